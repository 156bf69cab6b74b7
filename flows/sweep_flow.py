"""Several trainings that differ in some keys, of which the best is published:
`python flows/sweep_flow.py run --config configs/tiny/sweep.yaml`."""

# Metaflow creates `current.card` at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from metaflow import card, current, step

from flows import cards
from flows.base import PostTrainFlow
from ptf.artifact import Artifact
from ptf.config import Job, loads
from ptf.errors import Retryable, UserError
from ptf.workspace.credentials import redacted
from steps import stages, sweep


class SweepFlow(PostTrainFlow):
    """Train and evaluate every trial of flow.sweep, and publish the best one by publish.metric. For any recipe.

    On one machine, the trials run one after the other, or `--max-workers` at a time.
    """

    default_config = "configs/tiny/sweep.yaml"
    at_once = 1

    @step
    def start(self):
        """Check every trial before the first one runs."""
        self.run_name, self.trial, self.failed = self._run_name(), "", ""
        with self._reporting_errors():
            self.trials = sweep.trials(self._job())
            # models of other jobs: trained once, and the same for all trials
            self.models = dict(stages.prepare(self._job(), Artifact(run_name=self.run_name)).models)
        self.next(self.prepare, foreach="trials")

    @step
    def prepare(self):
        """Make the data of `data.prepare`."""
        self.number, self.trial, self.artifact = (
            self.index,
            self.input,
            Artifact(run_name=f"{self.run_name}-{self.index}"),
        )
        self._stage(stages.prepare)
        self.artifact = self.artifact.with_changes(models={**self.artifact.models, **self.models})
        self.next(self.tokenize)

    @card(type="blank", id="evaluate")
    @step
    def evaluate(self):
        """Evaluate the trained model on held-out data."""
        self._stage(stages.evaluate)
        cards.metrics_page(current.card["evaluate"], self.artifact, self._job(), self.failed)
        self.next(self.choose)

    @step
    def choose(self, inputs):
        """Choose the best trial, and continue with it alone."""
        self.trial, trials = "", sorted(inputs, key=lambda trial: trial.number)
        with self._reporting_errors():
            chosen = trials[sweep.best(self._job(), [trial.artifact.metrics for trial in trials])]
        self.run_name, self.trial, self.artifact, self.failed = chosen.run_name, chosen.trial, chosen.artifact, ""
        self.next(self.publish)

    def _stage(self, work: Callable[[Job, Artifact], Artifact]) -> None:
        """Do a step's work on a trial. If a trial fails because of its values (it diverged, or ran out of memory), the
        other trials continue; a resume would not help."""
        if current.step_name == "publish":
            super()._stage(work)
        elif not self.failed:
            super()._stage(partial(self._tried, work))

    def _tried(self, work: Callable[[Job, Artifact], Artifact], job: Job, artifact: Artifact) -> Artifact:
        try:
            return work(job, artifact)
        except Retryable:
            raise
        except UserError as error:
            self.failed = redacted(str(error))
            print(f"trial {self.number}: {self.failed}", file=sys.stderr)
            return artifact.with_changes(metrics={})

    def _run_directories(self, run_name: str) -> list[Path]:
        job = super()._job()
        return [Path(job.output) / f"{run_name}-{number}" for number in range(len(job.flow.sweep))]

    def _job(self) -> Job:
        return loads(self.trial) if self.trial else super()._job()


if __name__ == "__main__":
    SweepFlow()
