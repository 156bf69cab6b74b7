"""What ptf's engine asks of vLLM, and how it assigns what vLLM returns; vLLM itself is a double."""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptf.rl.engines.vllm_engine import VLLMEngine


class Steps:
    """Reports the requests that were submitted, the newest first, one a step."""

    def __init__(self) -> None:
        self.requests: dict[str, np.ndarray] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        name, context = self.requests.popitem()
        return [SimpleNamespace(request_id=name, prompt_logprobs=SimpleNamespace(logprobs=-context.astype(float)))]


@pytest.fixture
def engine() -> Any:
    made: Any = object.__new__(VLLMEngine)
    made.engine, names = Steps(), itertools.count()

    def submit(context: np.ndarray, **_: Any) -> str:
        made.engine.requests[name := str(next(names))] = context
        return name

    made._submit = submit
    made._adapter, made.max_model_len, made.vocab, made.unusable = None, 16, 8, None
    made.stepper = SimpleNamespace(exclusively=lambda _: contextlib.nullcontext())
    return made


@pytest.mark.parametrize("adapter", [None, "an adapter"])
def test_log_probs_of_prompts_are_in_the_order_of_the_prompts(engine, adapter):
    engine._adapter = adapter
    contexts = [np.array([1, 2]), np.array([3, 4, 5]), np.array([6])]
    found = engine.prompt_logprobs(contexts)
    assert [values.tolist() for values in found] == [(-context).tolist() for context in contexts]
    assert engine.prompt_logprobs([]) == []
