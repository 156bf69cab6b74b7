"""The contract of engines: ours keep it, and each way of breaking it is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.rl.engines.conformance import ConformanceSuite, Violation, make_of
from ptf.rl.engines.native import NativeEngine
from ptf.rl.weights.verification import Receipt
from ptf.run import run
from tests.child import run_python
from tests.rl.faulty import Plugged
from tests.rl.test_controller import raw as raw

SEEDS = {
    "shared seed": lambda engine, requests, request: engine.next_number(),
    "seed ignored": lambda engine, requests, request: 1,
    "batch decides": lambda engine, requests, request: request.seed + len(requests),
}
SAMPLING = {
    "never greedy": lambda most, sampling: {"temperature": sampling.temperature or 1.0},
    "stop ignored": lambda most, sampling: {"stop": ()},
    "one limit": lambda most, sampling: {"max_new_tokens": most},
    "no nucleus": lambda most, sampling: {"top_p": 1.0},
    "anything goes": lambda most, sampling: {"trie": None},
}
ANSWERS = {
    "raw log-probs": lambda engine, answer: replace(answer, logprobs=engine.raw(answer)),
    "float64": lambda engine, answer: replace(answer, logprobs=answer.logprobs.astype(np.float64)),
    "ends early": lambda engine, answer: answer if answer.finished else engine.first_part(answer),
    "old stamp": lambda engine, answer: replace(answer, versions=answer.versions - 1),
}


class Own(Plugged):
    """As somebody would plug it in. `fault` is one thing that it does wrong."""

    def __init__(self, directory, *, fault="", **usual):
        super().__init__(directory, **usual)
        self.fault, self.count = fault, 0

    def next_number(self):
        self.count += 1
        return self.count

    def answer(self, requests):
        if self.fault == "cannot" and any(r.sampling.trie or r.sampling.top_p < 1 for r in requests):
            raise ValueError("neither tries nor nuclei")
        if change := SEEDS.get(self.fault):
            requests = [replace(r, seed=change(self, requests, r)) for r in requests]
        if change := SAMPLING.get(self.fault):
            most = max(r.sampling.max_new_tokens for r in requests)
            requests = [replace(r, sampling=replace(r.sampling, **change(most, r.sampling))) for r in requests]
        change = ANSWERS.get(self.fault, lambda engine, answer: answer)
        return [change(self, answer) for answer in super().answer(requests)]

    @staticmethod
    def first_part(generation):
        arrays = {name: getattr(generation, name)[:-1] for name in ("sampled_ids", "logprobs", "versions")}
        return replace(generation, **arrays)

    def raw(self, generation):
        return self.prompt_logprobs([np.concatenate([generation.context, generation.sampled_ids])])[0][
            len(generation.context) - 1 :
        ]

    def load_weights(self, buckets, manifest):
        if self.fault == "takes all":
            self.version = manifest.version
            return Receipt(manifest.version, len(manifest.digests))
        receipt = None if self.fault == "keeps old" else super().load_weights(buckets, manifest)
        if receipt is None:
            from ptf.rl.weights.verification import check

            receipt = check(buckets, manifest, self.version)
            self.version = manifest.version
        return receipt

    def sleep(self):
        if self.fault == "forgets":
            with torch.no_grad():
                next(self.model.parameters()).zero_()


def contract(tmp_path, fault=""):
    return ConformanceSuite(
        make_of("tests.rl.engines.test_conformance:Own", [f"fault={fault}"], "fp32", tmp_path), tmp_path
    )


FOUND = {  # by which check
    "shared seed": "seeds",
    "seed ignored": "seeds",
    "batch decides": "batch_independence",
    "never greedy": "greedy",
    "stop ignored": "stops",
    "ends early": "stops",
    "one limit": "limits",
    "raw log-probs": "logprobs",
    "float64": "answers",
    "old stamp": "answers",
    "takes all": "refuses",
    "keeps old": "second_sync",
    "forgets": "sleeps",
    "no nucleus": "nucleus",
    "anything goes": "allowed",
}


@pytest.mark.parametrize("fault", FOUND)
def test_what_an_engine_does_wrong_is_found(tmp_path, fault):
    one = contract(tmp_path, fault)
    one.first_sync()
    with pytest.raises(Violation):
        getattr(one, FOUND[fault])()


def test_ours_in_fixed_batches_plugged_in_will_do(tmp_path):
    found = list(contract(tmp_path).findings())
    assert len(found) == len(set(FOUND.values())) + 3
    assert not any(finding.wrong or finding.refused for finding in found)


def test_a_built_in_engine_is_started_by_its_name(tmp_path):
    ConformanceSuite(make_of("native", [], "fp32", tmp_path), tmp_path).declares()


def test_ours_that_batches_continuously_will_do(tmp_path):
    def make(directory, version):
        cpu = torch.device("cpu")
        return NativeEngine(directory, device=cpu, dtype=torch.float32, version=version, continuous=True)

    assert [f for f in ConformanceSuite(make, tmp_path).findings() if f.wrong or f.refused] == []


def test_one_that_refuses_nuclei_and_tries_will_do(tmp_path):
    one = contract(tmp_path, "cannot")
    one.first_sync()
    for check in (one.nucleus, one.allowed):
        one.refused = False
        check()
        assert one.refused


@pytest.mark.cluster
def test_vllm_will_do():
    done = run_python("-m", "ptf.cli", "check-engine", "vllm", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vllm: all checks passed" in done.stdout
    assert done.stdout.count("ok   ") == 15


def test_a_run_with_an_engine_of_ones_own(raw):
    raw["rollout"]["engine"] = {"use": "tests.rl.engines.test_conformance:Own"}
    raw["train"]["steps"] = 2
    rows = read_metrics(run(loads(yaml.safe_dump(raw)), "a") / "metrics.jsonl")
    assert all(row["logprob_diff_max"] <= 1e-5 for row in rows)


def test_a_response_that_is_missing_is_found(tmp_path, monkeypatch):
    one = contract(tmp_path)
    one.first_sync()
    one.answers()
    generate = one.generate
    monkeypatch.setattr(one, "generate", lambda requests: generate(requests)[:-1])
    with pytest.raises(ValueError, match="shorter"):
        one.answers()
