"""Early stopping: end a run when a held-out loss no longer falls."""

from collections.abc import Mapping
from typing import Any


class EarlyStopping:
    """Early stopping by one metric; rows of metrics without it are ignored."""

    def __init__(self, metric: str, patience: int) -> None:
        self.metric = metric
        self.patience = patience
        self._best = float("inf")
        self._since = 0

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric has been measured `patience` times without a new lowest value."""
        if self.metric not in metrics:
            return False
        if metrics[self.metric] < self._best:
            self._best, self._since = metrics[self.metric], 0
        else:
            self._since += 1
        return self._since >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and the number of measurements since."""
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best, self._since = float(state["best"]), int(state["since"])
