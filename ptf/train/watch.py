"""When to stop before the end: a held-out metric that has stopped getting better."""

from collections.abc import Mapping
from typing import Any, Literal


class Watch:
    """Sees every step's metrics; those without its own metric count for nothing."""

    def __init__(self, metric: str, mode: Literal["min", "max"], patience: int, min_delta: float) -> None:
        self.metric, self._sign, self._patience, self._min_delta = metric, 1.0 if mode == "min" else -1.0, patience, min_delta
        self._best = float("inf")
        self._since = 0

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric has been seen `patience` times without having got better by `min_delta`."""
        if self.metric not in metrics:
            return False
        value = self._sign * metrics[self.metric]
        if value < self._best - self._min_delta:
            self._best, self._since = value, 0
        else:
            self._since += 1
        return self._since >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._since = float(state["best"]), int(state["since"])
