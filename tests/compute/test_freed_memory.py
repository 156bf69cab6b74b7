"""A process that keeps its heap touches no memory for the first time twice."""

import json
import os
import sys

import pytest

from ptf.compute import world
from tests.child import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
SCRIPT = """
import json, resource, sys
import torch
from ptf.compute import world
kept = world.keep_freed_memory() if sys.argv[1] == "keep" else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        a, b = torch.ones(16 << 20), torch.zeros(12 << 20)
        del a, b
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):
    faults()
print(json.dumps([kept, faults()]))
"""


def ran(how: str, **variables: str) -> tuple[bool | None, int]:
    environment = {k: v for k, v in os.environ.items() if k not in world.HEAP_SETTINGS} | variables
    done = run_python("-c", SCRIPT, how, env=environment, timeout=120, check=True)
    kept, faults = json.loads(done.stdout.splitlines()[-1])
    return kept, faults


def test_memory_that_was_freed_is_used_again() -> None:
    kept, few = ran("keep")
    _, many = ran("leave")
    assert kept
    assert few < 500 < 20_000 < many


def test_a_users_own_setting_stays() -> None:
    kept, many = ran("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept is False
    assert many > 20_000
