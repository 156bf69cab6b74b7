"""Answers that there may be, as a trie of tokens: for ids of a catalogue, labels, or whatever else must not be made up.

The one idea: which tokens may follow depends on the answer's tokens alone. So an engine that draws and a trainer that looks at what was drawn, now or
after several updates, restrict to the same sets without sending them to each other.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    repeat: int = 1
    under: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [edges]: how many answers it leads to; empty where one may be said twice

    @property
    def width(self) -> int:
        """Numbers that say what may follow a token: the state, and the most tokens that are taken out of it."""
        return self.repeat if len(self.under) else 1

    @staticmethod
    def of(answers: Iterable[Sequence[int]], stop: Sequence[int], repeat: int = 1, distinct: bool = False) -> "Trie":
        """`repeat` of the answers one after the other, `distinct`: none of them twice; and then one of the stop tokens. Raises UserError if there are
        none or too few, one is empty or has a stop token in it, or, where they repeat, one begins with another, for then it could not be said where the
        next one begins."""
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
        if distinct and len(ends) < repeat:
            raise UserError(f"there are {len(ends)} allowed answers, too few for {repeat} that are distinct")
        leaves = [0] * len(nodes)  # node → answers that end there or further on
        for node in reversed(range(len(nodes))):
            leaves[node] = (node in ends) + sum(leaves[child] for child in nodes[node].values())
        size, edges = len(nodes), list[list[tuple[int, int, int]]]()
        for time in range(repeat):
            last = time == repeat - 1
            into = lambda child, at=time * size: at + size if child in ends else at + child  # noqa: E731
            for node, follows in enumerate(nodes):
                found = [(token, time * size + child if last else into(child), leaves[child]) for token, child in follows.items()]
                found += [(token, OVER, 1) for token in stop] if last and node in ends else []
                edges.append(sorted(found))
        tokens, states, under = np.array([edge for of in edges for edge in of], np.int32).T.copy()
        starts = np.cumsum([0, *map(len, edges)])
        return Trie(starts, tokens, states, max(ends.values()) * repeat + 1, repeat, under if distinct else under[:0])

    def allowed(self, state: int) -> np.ndarray:
        """Tokens that may follow, [k], rising."""
        return self.tokens[self.starts[state] : self.starts[state + 1]]

    def follow(self, state: int, token: int) -> int:
        """The state after it. Raises ValueError if it never follows there."""
        found = np.searchsorted(self.allowed(state), token) + self.starts[state] if state != OVER else len(self.tokens)
        if state == OVER or found >= self.starts[state + 1] or self.tokens[found] != token:
            raise ValueError(f"token {token} is not one that may follow")
        return int(self.states[found])

    def walked(self, tokens: Iterable[int]) -> np.ndarray:
        """What each token of an answer was drawn from, [n, width] int32: the state, and tokens that are taken out of it, −1 for none. Raises ValueError if
        one is not allowed."""
        walk, seen = Walk(self), list[list[int]]()
        for token in tokens:
            seen.append(walk.place())
            walk.follow(int(token))
        return np.array(seen, np.int32).reshape(-1, self.width)

    def save(self, path: str) -> None:
        """`load` is the inverse."""
        np.savez(path, starts=self.starts, tokens=self.tokens, states=self.states, longest=self.longest, repeat=self.repeat, under=self.under)

    @staticmethod
    def load(path: str) -> "Trie":
        with np.load(path) as found:
            return Trie(found["starts"], found["tokens"], found["states"], int(found["longest"]), int(found["repeat"]), found["under"])

    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(part.tobytes() for part in (self.starts, self.tokens, self.states, self.under))).hexdigest()[:16]


class Walk:
    """One answer on its way through a trie."""

    def __init__(self, trie: Trie) -> None:
        self.trie, self.state = trie, 0
        self._begun: tuple[int, ...] = ()  # tokens of the one that is being said
        self._said: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))  # beginning → next token → how many were said so

    def taken(self) -> list[int]:
        """Tokens that lead to nothing but what was said already."""
        if not len(self.trie.under) or self.state == OVER:
            return []
        first, allowed = self.trie.starts[self.state], self.trie.allowed(self.state)
        return [t for t, n in self._said[self._begun].items() if n == self.trie.under[first + np.searchsorted(allowed, t)]]

    def allowed(self) -> np.ndarray:
        """Tokens that may follow, [k], rising."""
        return np.setdiff1d(self.trie.allowed(self.state), self.taken(), assume_unique=True)

    def place(self) -> list[int]:
        """[width]: the state, and what is taken out of it; −1 where nothing is."""
        taken = self.taken()
        return [self.state, *taken, *[-1] * (self.trie.width - 1 - len(taken))]

    def follow(self, token: int) -> None:
        """Raises ValueError if it is not allowed."""
        if token in self.taken():
            raise ValueError(f"token {token} leads to what was said already")
        before, self.state = self.state, self.trie.follow(self.state, token)
        if not len(self.trie.under):
            return
        size = (len(self.trie.starts) - 1) // self.trie.repeat
        self._begun += (token,)
        if self.state // size > before // size:
            for n, token in enumerate(self._begun):
                self._said[self._begun[:n]][token] += 1
            self._begun = ()
