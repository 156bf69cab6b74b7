"""vLLM keeps its weights in host memory while it sleeps only where they are needed again."""

import asyncio
from typing import Any

import pytest

from ptf.rl.engines import vllm_engine
from ptf.rl.engines.stepper import Stepper
from ptf.rl.engines.vllm_engine import VLLMEngine
from ptf.rl.weights.verification import Manifest, SyncError
from tests.rl.engines.test_native import ask, contexts


class Recorded:
    """In place of vLLM's LLMEngine: what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def reset_prefix_cache(self) -> bool:
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", tags))

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[None]:
        self.calls.append((method, len(args)))
        return [None]


@pytest.fixture
def engine(monkeypatch) -> VLLMEngine:
    monkeypatch.setattr(vllm_engine, "on_cpu", lambda: False)
    made = VLLMEngine.__new__(VLLMEngine)
    made.engine = Recorded()
    made.names, made.carried = set(), set()
    made.version, made.unusable, made.adapted, made._adapted = 3, None, False, None
    made._weights_follow, made._asleep, made.stepper = False, set(), Stepper(made)
    return made


def test_without_new_weights_they_are_kept(engine):
    engine.sleep()
    engine.wake()
    assert engine.engine.calls == [("sleep", 1), ("wake", ["weights"])]
    assert engine.unusable is None


def test_weights_that_a_sync_replaces_are_discarded_once(engine):
    engine.expect_weights()
    engine.sleep()
    engine.wake()
    engine.load_weights([], Manifest(4, {}))
    engine.sleep()
    assert engine.engine.calls == [("sleep", 2), ("wake", ["weights"]), ("ptf_load", 1), ("sleep", 1)]
    assert (engine.version, engine.unusable) == (4, None)


def test_nothing_is_generated_from_weights_that_were_discarded(engine):
    engine.expect_weights()
    engine.sleep()
    engine.wake()
    (request,) = ask(contexts(1))
    with pytest.raises(SyncError, match="discarded its weights"):
        asyncio.run(engine.stepper.generate(request))
    with pytest.raises(SyncError, match="discarded its weights"):
        engine.prompt_logprobs([])
    with pytest.raises(SyncError, match="a sync was lost"):
        engine.load_weights([], Manifest(9, {}))
    with pytest.raises(SyncError, match="discarded its weights"):
        engine.prompt_logprobs([])


@pytest.mark.parametrize("kept", ["the base of an adapter", "what is not sent"])
def test_what_a_sync_does_not_replace_is_kept(engine, kept):
    if kept == "what is not sent":
        engine.carried = {"vision_tower.weight"}
    else:
        engine.adapted = True
    engine.expect_weights()
    engine.sleep()
    assert engine.engine.calls == [("sleep", 1)]
