"""Answers that there may be, as a trie of tokens: for ids of a catalogue, labels, or whatever else must not be made up.

The one idea: which tokens may follow depends on the answer's tokens alone. So an engine that draws and a trainer that looks at what was drawn, now or
after several updates, restrict to the same sets without sending them to each other.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ptf.errors import UserError

OVER = -1  # the state after a stop token


@dataclass(frozen=True, eq=False)
class Trie:
    """An answer begins in state 0. Edges of a state are in the order of their tokens."""

    starts: np.ndarray  # [states + 1] int64: where each state's edges begin
    tokens: np.ndarray  # [edges] int32
    states: np.ndarray  # [edges] int32: which state follows
    longest: int  # tokens of the longest answer, with the one that stops it

    @staticmethod
    def of(answers: Iterable[Sequence[int]], stop: Sequence[int], repeat: int = 1) -> "Trie":
        """`repeat` of the answers one after the other, and then one of the stop tokens. Raises UserError if there are none, one is empty or has a stop
        token in it, or, where they repeat, one begins with another, for then it could not be said where the next one begins."""
        if not stop:
            raise UserError("allowed answers need a stop token that ends them; the tokenizer has none")
        nodes: list[dict[int, int]] = [{}]
        ends: dict[int, int] = {}  # node → tokens of the answer that ends there
        for ids in answers:
            if not len(ids):
                raise UserError("one of the allowed answers is empty")
            if set(stop) & set(map(int, ids)):
                raise UserError(f"an allowed answer has a stop token in it: {list(map(int, ids))[:10]}")
            node = 0
            for token in map(int, ids):
                if token not in nodes[node]:
                    nodes[node][token] = len(nodes)
                    nodes.append({})
                node = nodes[node][token]
            ends[node] = len(ids)
        if not ends:
            raise UserError("there are no allowed answers")
        if repeat > 1 and any(nodes[node] for node in ends):
            raise UserError("an allowed answer begins with another one, so repeated ones cannot be told apart")
        size, edges = len(nodes), list[list[tuple[int, int]]]()
        for time in range(repeat):
            last = time == repeat - 1
            into = lambda child, at=time * size: at + size if child in ends else at + child  # noqa: E731
            for node, follows in enumerate(nodes):
                found = [(token, time * size + child if last else into(child)) for token, child in follows.items()]
                found += [(token, OVER) for token in stop] if last and node in ends else []
                edges.append(sorted(found))
        pairs = [pair for of in edges for pair in of]
        starts = np.cumsum([0, *map(len, edges)])
        return Trie(starts, np.array([t for t, _ in pairs], np.int32), np.array([s for _, s in pairs], np.int32), max(ends.values()) * repeat + 1)

    def allowed(self, state: int) -> np.ndarray:
        """Tokens that may follow, [k], rising."""
        return self.tokens[self.starts[state] : self.starts[state + 1]]

    def follow(self, state: int, token: int) -> int:
        """The state after it. Raises ValueError if it is not allowed."""
        found = np.searchsorted(self.allowed(state), token) + self.starts[state] if state != OVER else len(self.tokens)
        if state == OVER or found >= self.starts[state + 1] or self.tokens[found] != token:
            raise ValueError(f"token {token} is not one that may follow")
        return int(self.states[found])

    def walked(self, tokens: Iterable[int]) -> np.ndarray:
        """The state that each token of an answer was drawn in, [n] int32. Raises ValueError if one is not allowed."""
        state, seen = 0, list[int]()
        for token in tokens:
            seen.append(state)
            state = self.follow(state, int(token))
        return np.array(seen, np.int32)

    def save(self, path: str) -> None:
        """`load` is the inverse."""
        np.savez(path, starts=self.starts, tokens=self.tokens, states=self.states, longest=self.longest)

    @staticmethod
    def load(path: str) -> "Trie":
        with np.load(path) as found:
            return Trie(found["starts"], found["tokens"], found["states"], int(found["longest"]))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.starts.tobytes() + self.tokens.tobytes() + self.states.tobytes()).hexdigest()[:16]
