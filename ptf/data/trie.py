"""The allowed responses as a trie of tokens: ids of a catalogue, labels, or anything else that a model must not invent.

Which tokens may follow depends on the response's tokens alone. So an engine that samples and a trainer that scores the
samples, now or after several updates, restrict to the same sets without sending them to each other.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from ptf.errors import UserError

OVER = -1  # the state after a stop token


@dataclass(frozen=True, eq=False)
class Trie:
    """A trie of responses. A response begins in state 0, and the edges of a state are in the order of their tokens."""

    starts: np.ndarray  # [states + 1] int64: where each state's edges begin
    tokens: np.ndarray  # [edges] int32
    next_states: np.ndarray  # [edges] int32: the state that each edge leads to
    longest: int  # tokens of the longest response, its stop token included
    repeat: int = 1
    # [edges]: how many lines the edge leads to; empty where a line may occur twice.
    under: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def width(self) -> int:
        """Return how many numbers describe what may follow a token: the state, and the most tokens that it excludes."""
        return self.repeat if len(self.under) else 1

    @staticmethod
    def of(answers: Iterable[Sequence[int]], stop: Sequence[int], repeat: int = 1, distinct: bool = False) -> "Trie":
        """Build the trie of responses: `repeat` lines (`answers`) one after the other, and then one of the stop tokens.

        `distinct`: no line occurs twice. Raises UserError if there are no lines or too few, if one is empty or
        contains a stop token, or, where they repeat, if one begins with another: it would then be ambiguous where the
        next one begins.
        """
        if not stop:
            raise UserError("allowed responses need a stop token that ends them; the tokenizer has none")
        nodes, ends = _prefix_tree(answers, stop)
        if repeat > 1 and any(nodes[node] for node in ends):
            raise UserError(
                "rollout.constrained_decoding: one line begins with another one; with lines_per_response above 1 "
                "it would be unclear "
                "where a line ends. Remove or change one of them"
            )
        if distinct and len(ends) < repeat:
            raise UserError(
                f"rollout.constrained_decoding has {len(ends)} different lines; distinct: true with "
                f"lines_per_response: {repeat} "
                f"needs at least {repeat}"
            )
        leaves = [0] * len(nodes)  # node → number of lines that end there or below
        for node in reversed(range(len(nodes))):
            leaves[node] = (node in ends) + sum(leaves[child] for child in nodes[node].values())
        size = len(nodes)
        edges: list[list[tuple[int, int, int]]] = []  # of each state: (token, next state, lines below)
        for repetition in range(repeat):
            first = repetition * size  # state of this repetition's root; state of a node: first + node
            last = repetition == repeat - 1
            for node, children in enumerate(nodes):
                node_edges: list[tuple[int, int, int]] = []
                for token, child in children.items():
                    # where a line ends, the next one begins at the next repetition's root
                    state = first + (size if child in ends and not last else child)
                    node_edges.append((token, state, leaves[child]))
                if last and node in ends:
                    node_edges += [(token, OVER, 1) for token in stop]
                edges.append(sorted(node_edges))
        tokens, next_states, under = np.array(list(chain.from_iterable(edges)), np.int32).T.copy()
        starts = np.cumsum([0, *map(len, edges)])
        return Trie(
            starts, tokens, next_states, max(ends.values()) * repeat + 1, repeat, under if distinct else under[:0]
        )

    def allowed(self, state: int) -> np.ndarray:
        """Return the tokens that may follow, [k], ascending."""
        return self.tokens[self.starts[state] : self.starts[state + 1]]

    def follow(self, state: int, token: int) -> int:
        """Return the state after a token. Raises ValueError if the token may not follow."""
        edge = np.searchsorted(self.allowed(state), token) + self.starts[state] if state != OVER else len(self.tokens)
        if state == OVER or edge >= self.starts[state + 1] or self.tokens[edge] != token:
            raise ValueError(f"token {token} may not follow")
        return int(self.next_states[edge])

    def walked(self, tokens: Iterable[int]) -> np.ndarray:
        """Return the restriction that each token of a response was sampled from, [n, width] int32.

        It holds the state, and the tokens that it excludes; −1 fills the rest. Raises ValueError for a token that is
        not allowed.
        """
        cursor, rows = TrieCursor(self), list[list[int]]()
        for token in tokens:
            rows.append(cursor.place())
            cursor.follow(int(token))
        return np.array(rows, np.int32).reshape(-1, self.width)

    def save(self, path: str) -> None:
        """Write the trie to a file; `load` is the inverse."""
        np.savez(path, **vars(self))

    @staticmethod
    def load(path: str) -> "Trie":
        """Read a trie that `save` wrote."""
        with np.load(path) as stored:
            parts: dict[str, Any] = {name: values if values.ndim else int(values) for name, values in stored.items()}
        return Trie(**parts)

    def fingerprint(self) -> str:
        """Return a hash of the trie."""
        return hashlib.sha256(
            b"".join(part.tobytes() for part in (self.starts, self.tokens, self.next_states, self.under))
        ).hexdigest()[:16]


def _prefix_tree(answers: Iterable[Sequence[int]], stop: Sequence[int]) -> tuple[list[dict[int, int]], dict[int, int]]:
    """Return the nodes of a tree of the lines, token → child each, and the nodes where a line ends.

    The latter map to the line's number of tokens. Raises UserError for an invalid line, or if there is none.
    """
    nodes: list[dict[int, int]] = [{}]
    ends: dict[int, int] = {}
    for ids in answers:
        if not len(ids):
            raise UserError("one of the allowed responses is empty")
        if set(stop) & set(map(int, ids)):
            raise UserError(f"an allowed response has a stop token in it: {list(map(int, ids))[:10]}")
        node = 0
        for token in map(int, ids):
            if token not in nodes[node]:
                nodes[node][token] = len(nodes)
                nodes.append({})
            node = nodes[node][token]
        ends[node] = len(ids)
    if not ends:
        raise UserError("there are no allowed responses")
    return nodes, ends


class TrieCursor:
    """A position in a trie that follows one response, token by token."""

    def __init__(self, trie: Trie) -> None:
        self.trie, self.state = trie, 0
        self._prefix: tuple[int, ...] = ()  # tokens of the current line so far
        # beginning of a line → next token → how many lines went that way
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def taken(self) -> list[int]:
        """Return the tokens that lead only to lines that were given already."""
        if not len(self.trie.under) or self.state == OVER:
            return []
        first, allowed = self.trie.starts[self.state], self.trie.allowed(self.state)
        return [
            t
            for t, n in self._counts[self._prefix].items()
            if n == self.trie.under[first + np.searchsorted(allowed, t)]
        ]

    def allowed(self) -> np.ndarray:
        """Return the tokens that may follow, [k], ascending."""
        return np.setdiff1d(self.trie.allowed(self.state), self.taken(), assume_unique=True)

    def place(self) -> list[int]:
        """Return the state and the tokens that it excludes, [width]; −1 fills the rest."""
        excluded = self.taken()
        return [self.state, *excluded, *[-1] * (self.trie.width - 1 - len(excluded))]

    def follow(self, token: int) -> None:
        """Advance by a token. Raises ValueError if it is not allowed."""
        if token in self.taken():
            raise ValueError(f"token {token} leads only to lines that were given already")
        before, self.state = self.state, self.trie.follow(self.state, token)
        if not len(self.trie.under):
            return
        size = (len(self.trie.starts) - 1) // self.trie.repeat
        self._prefix += (token,)
        if self.state // size > before // size:
            for n, token in enumerate(self._prefix):
                self._counts[self._prefix[:n]][token] += 1
            self._prefix = ()
