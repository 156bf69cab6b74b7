"""The flow as it is, with toy work: train leaves a line in trained.jsonl, the others do nothing. TOY=refuse, =hang,
=preempt: what train does next; =unpublished: what publish does; or both, with a space between them."""

import json
import os
import time
from pathlib import Path

from flows.base import PostTrainFlow
from ptf.artifact import Artifact
from ptf.config import Job
from ptf.errors import Stopped, UserError


def nothing(job: Job, artifact: Artifact) -> Artifact:
    return artifact


def train(job: Job, artifact: Artifact) -> Artifact:
    run = Path(job.output) / artifact.run_name
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in (1, 2, 3)))
    with open("trained.jsonl", "a") as file:
        print(json.dumps({"run_name": artifact.run_name, "lr": job.train.lr, "pid": os.getpid()}), file=file)
    acts = os.environ.get("TOY", "").split()
    if "preempt" in acts and not Path("preempted").exists():
        Path("preempted").touch()
        raise Stopped(2, 5, "a checkpoint")
    if "refuse" in acts:
        raise UserError("no file matches data/*.jsonl")
    try:
        time.sleep(60 if "hang" in acts else 0)
    finally:
        Path("unwound").touch()
    return artifact.with_changes(model="a-model", metrics={"train/loss": 1 / 3})


def publish(job: Job, artifact: Artifact) -> Artifact:
    if "unpublished" in os.environ.get("TOY", "").split():
        raise UserError("not published: loss/dev is 2, the published version has 1")
    return artifact


class ToyFlow(PostTrainFlow):
    recipes = ("sft",)
    default_config = "toy.yaml"

    def _stage(self, work):
        super()._stage({"train": train, "publish": publish}.get(work.__name__, nothing))


if __name__ == "__main__":
    ToyFlow()
