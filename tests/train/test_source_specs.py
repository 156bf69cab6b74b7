"""What of a config's sources the data layer is told."""

import yaml

from ptf.config import loads
from ptf.train.source_specs import specs


def test_a_source_has_its_own_settings_and_else_those_of_the_job():
    given = {
        "plain": {"path": "a.jsonl"},
        "own": {"path": "b.jsonl", "kind": "text", "epochs": 3, "limit": 7, "sampling_weight": 2.0},
    }
    raw = {
        "recipe": "sft",
        "model": {"path": "m"},
        "data": {"sources": given, "seq_len": 8},
        "train": {"epochs": 2, "lr": 1e-3},
    }
    sources = loads(yaml.safe_dump(raw)).data.sources
    found = specs(sources, 2, 1e9)
    assert {name: one.epochs for name, one in found.items()} == {"plain": 2, "own": 3}
    assert {name: one.epochs for name, one in specs(sources).items()} == {"plain": None, "own": 3}
    own = found["own"]
    assert (own.path, own.kind, own.limit, own.verify_up_to) == ("b.jsonl", "text", 7, 1e9)
    assert specs(sources)["plain"].verify_up_to == float("inf")
