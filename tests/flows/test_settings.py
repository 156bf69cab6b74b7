"""`flow:` of the config on the steps of the graph."""

import json

import pytest

from flows.settings import decorators
from ptf.config.sections.flow import StageConfig
from tests.flows.toy import FLOW, Toy


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"retries": 0}, {}),
        ({"gpu": 0}, {"resources": {"gpu": 0}}),
        ({"cpu": 4, "memory_mib": 9000}, {"resources": {"cpu": 4, "memory": 9000}}),
        ({"env_vars": {"A": "b"}}, {"environment": {"vars": {"A": "b"}}}),
        (
            {"gpu": 8, "retries": 3, "timeout_minutes": 90},
            {"resources": {"gpu": 8}, "retry": {"times": 3}, "timeout": {"minutes": 90}},
        ),
    ],
)
def test_settings_become_decorators(settings, expected):
    assert decorators(settings) == expected
    assert decorators(StageConfig(**settings).model_dump(mode="json")) == expected


def test_the_graph_has_them_and_is_whole_without_a_config(tmp_path):
    toy = Toy(tmp_path)
    with_config, without = (
        json.loads(toy(*words, "output-raw", "--json").stdout)
        for words in (("--config", str(FLOW.with_name("toy.yaml"))), ())
    )
    found = {deco["name"]: deco["attributes"] for deco in with_config["graph"]["train"]["decorators"]}
    assert found["resources"]["cpu"] == 2
    assert found["retry"]["times"] == 2
    assert found["timeout"]["minutes"] == 5
    assert [deco["name"] for deco in without["graph"]["train"]["decorators"]] == ["card"]
    assert [deco["name"] for deco in with_config["graph"]["tokenize"]["decorators"]] == []
