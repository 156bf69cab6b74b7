"""Verification of a checkpoint: our decoder against transformers' model of the same trained weights.

Trained weights magnify rounding, and no fixed bound knows by how much. So transformers computes the exact result in
fp64, and our error beside it may be at most `FACTOR` times that of transformers in fp32; the same in bf16, without
gradients. Where transformers itself is too far from the exact result, nothing is judged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ptf.errors import UserError, raise_if_custom_code
from ptf.model import bridge, matrix_product
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.families import Family, family_of
from ptf.model.rounding import Double
from ptf.model.verify import (
    LENGTHS,
    exact_reference,
    own_gradients,
    quiet,
    reference,
    round_trip,
    stored_gradients,
)

FACTOR = 4.0  # our error beside transformers'
LEAST = 1e-6  # what transformers' error counts as at least
LOGITS, GRADIENTS = 1e-4, 1e-3  # largest errors in fp32 that are judged: of the largest logit, and of a gradient's norm
LONG, LONGEST = 1024, 4096  # tokens of the long document: at least, and at most
# Of the random tokens. A few magnify rounding a hundredfold in Qwen2.5-Coder-0.5B: transformers' error of its logits is
# 1.0e-4 (seeds 1 and 2: 9.3e-5 and 2.1e-5), so that it cannot be judged.
SEED = 0
KEPT = 256  # positions of the long document whose logits are compared
ROWS = (
    "What is the capital of France, and which river runs through it?",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n",
    "A train leaves at 9:40 and needs 2 h 35 min for 310 km. When does it arrive, and how fast is it?",
    "Übersetze ins Englische: Der Bäcker verkauft morgens frisches Brot. 然后把它翻译成中文。",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, 2, 3], "unit": "°C"}}',
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison with the exact result."""

    what: str
    theirs: float  # error of transformers
    ours: float
    bound: float  # the largest error that is judged
    tolerance: float  # of our error

    @property
    def verdict(self) -> str:
        """Return "pass", "fail", or "cannot judge" where transformers is too far from the exact result."""
        if not self.theirs <= self.bound:
            return "cannot judge"
        return "pass" if self.ours <= self.tolerance else "fail"

    @property
    def passed(self) -> bool:
        """Whether our error is within the tolerance."""
        return self.verdict == "pass"


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The comparisons of one checkpoint; of the gradients the one that is closest to its tolerance, or beyond it."""

    model: str
    findings: tuple[Finding, ...]
    problems: tuple[str, ...] = ()  # tensors that do not map, or change on the way back
    notes: tuple[str, ...] = ()  # what was not compared

    @property
    def passed(self) -> bool:
        """Whether there are comparisons, all passed, and there are no problems."""
        return bool(self.findings) and all(f.passed for f in self.findings) and not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        found = [asdict(finding) | {"verdict": finding.verdict} for finding in self.findings]
        return asdict(self) | {"passed": self.passed, "findings": found}


@dataclass(frozen=True, slots=True)
class _Result:
    """What a model computes; errors are beside another result."""

    documents: Sequence[Tensor]  # logits [T, vocab] of random documents, then of real rows
    long: Tensor  # logits [KEPT, vocab]
    gradients: dict[str, Tensor]

    def errors(self, exact: "_Result") -> dict[str, float]:
        """Return the errors of logits, and of each gradient by its tensor's name."""
        n = len(LENGTHS)
        found = {"random tokens": _logit_error(self.documents[:n], exact.documents[:n])}
        if len(exact.documents) > n:
            found["real rows"] = _logit_error(self.documents[n:], exact.documents[n:])
        found["long document"] = _logit_error([self.long], [exact.long])
        return found | {name: _distance(gradient, exact.gradients[name]) for name, gradient in self.gradients.items()}


class Reference:
    """What transformers computes of a checkpoint, exactly and with rounding: made once, for any number of comparisons.

    One model is in memory at a time. Raise UserError for a checkpoint that transformers cannot load.
    """

    def __init__(self, directory: Path) -> None:
        quiet()
        self.directory, self.config = directory, bridge.read_config(directory)
        self.inputs = _Inputs.of(directory, bridge.decoder_config(directory))
        family = family_of(self.config)
        try:
            with Double():
                self.exact = _theirs(exact_reference(directory), family, self.inputs)
        except Exception as error:  # transformers raises a dozen kinds; each means that nothing can be compared
            raise_if_custom_code(directory, error)
            first = str(error).strip().splitlines()[0]
            raise UserError(f"{directory}: transformers cannot load it: {first}") from error
        self.errors = _theirs(reference(directory), family, self.inputs).errors(self.exact)
        with torch.no_grad():
            rounded = _theirs(reference(directory, torch.bfloat16), family, self.inputs)
        self.errors_bf16 = rounded.errors(self.exact)

    @matrix_product.left_to_torch()
    def compare(self, change: Callable[[Decoder], Any] | None = None) -> CheckpointReport:
        """Compare our decoder, to which `change` is applied after loading (to test that a mistake is caught).

        The last finding is the first that did not pass.
        """
        findings: list[Finding] = []
        try:
            ours, family = bridge.build(self.directory)
            bridge.materialize(ours, torch.device("cpu"))
            bridge.load_hf(ours, self.directory, family)
            problems = round_trip(ours, family, self.directory)
            if change is not None:
                change(ours)
            for finding in self._findings(ours, family):
                findings.append(finding)
                if not finding.passed:
                    break
        except (UserError, AssertionError) as error:  # a setting, a tensor, or a parameter without a mapping
            return CheckpointReport(str(self.directory), (), tuple(str(error).splitlines()))
        return CheckpointReport(str(self.directory), tuple(findings), tuple(problems), self.inputs.notes)

    def _findings(self, ours: Decoder, family: Family) -> Iterator[Finding]:
        result = _ours(ours, family, self.inputs)
        errors = result.errors(self.exact)
        logits = {name: error for name, error in errors.items() if name not in result.gradients}
        for name, error in logits.items():
            yield self._finding(f"fp32, {name}", self.errors[name], error, LOGITS)
        gradients = [
            self._finding(f"fp32, gradient of {name}", self.errors[name], errors[name], GRADIENTS)
            for name in result.gradients
        ]
        yield max(gradients, key=lambda f: (not f.passed, f.ours / f.tolerance))
        with torch.no_grad():
            least = self._finding("", max(self.errors[name] for name in logits), 0.0, LOGITS).tolerance
            alone, leak = _alone(ours, result, self.inputs), _leak(ours, result, self.inputs)
            yield Finding("fp32, packed beside alone", 0.0, alone, LOGITS, least)
            # experts compute tokens of all documents together, in as many rows as there are
            yield Finding("fp32, leak between documents", 0.0, leak, LOGITS, least if ours.config.experts else 0.0)
            errors = _ours(ours.bfloat16(), family, self.inputs).errors(self.exact)
        for name, error in errors.items():
            yield self._finding(f"bf16, {name}", self.errors_bf16[name], error, float("inf"))

    @staticmethod
    def _finding(what: str, theirs: float, ours: float, bound: float) -> Finding:
        return Finding(what, theirs, ours, bound, min(FACTOR * max(theirs, LEAST), bound))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Documents, of which gradients are taken, and a long one."""

    documents: list[Tensor]  # random tokens of LENGTHS, then real rows
    upstream: list[Tensor]  # gradients of their logits
    long: Tensor
    kept: Tensor  # positions of the long document
    notes: tuple[str, ...]

    @staticmethod
    def of(directory: Path, c: DecoderConfig) -> "_Inputs":
        """Draw and encode them for a checkpoint."""
        generator, notes = torch.Generator().manual_seed(SEED), []
        documents = [torch.randint(0, c.vocab, (n,), generator=generator) for n in LENGTHS]
        reach = max(max(layer.window or 0, layer.rope.original_positions) for layer in c.layers)
        tokens = min(max(LONG, reach + reach // 8 + 1), LONGEST, c.max_positions)
        if (directory / "tokenizer.json").is_file():
            rows, long = _encoded(directory, tokens)
            documents += [row[: c.max_positions] for row in rows]
        else:
            long = torch.randint(0, c.vocab, (tokens,), generator=generator)
            notes.append("there is no tokenizer.json: no real rows, and the long document is of random tokens")
        if len(long) <= reach:
            notes.append(f"not compared: what a window or context of {reach:,} tokens changes beyond {len(long):,}")
        upstream = [torch.randn(len(d), c.vocab, generator=generator) for d in documents]
        kept = torch.linspace(0, len(long) - 1, min(KEPT, len(long))).long()
        return _Inputs(documents, upstream, long, kept, tuple(notes))

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and segments of the documents in one sequence, [1, T], with padding at its end."""
        padding = torch.zeros(7, dtype=torch.long)
        tokens = torch.cat([*self.documents, padding])
        positions = torch.cat([torch.arange(len(d)) for d in (*self.documents, padding)])
        segments = torch.cat([torch.full_like(d, i) for i, d in enumerate(self.documents)] + [padding - 1])
        return tokens[None], positions[None], segments[None]


def _encoded(directory: Path, tokens: int) -> tuple[list[Tensor], Tensor]:
    """Return the real rows, as chats if there is a template, and so many tokens of a real text: ptf's own code."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": row}], tokenize=False, add_generation_prompt=True)
        if tokenizer.chat_template
        else row
        for row in ROWS
    ]
    rows = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    code = "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("ve*.py")))
    return rows, torch.tensor(tokenizer.encode(code, add_special_tokens=False)[:tokens])


def _theirs(hf: Any, family: Family, inputs: _Inputs) -> _Result:
    """Run transformers' model over each document alone. Its parameters are lost."""
    hf.eval()
    cast("nn.Embedding", hf.get_input_embeddings()).padding_idx = None  # it would zero one row's gradient
    logits = [hf(input_ids=d[None], use_cache=False).logits[0] for d in inputs.documents]
    gradients: dict[str, Tensor] = {}
    with torch.no_grad():
        long = hf(input_ids=inputs.long[None], use_cache=False, logits_to_keep=inputs.kept).logits[0]
    if torch.is_grad_enabled():
        _objective(logits, inputs).backward()
        gradients = stored_gradients(hf, family, [_taken(p) for p in hf.parameters()])
    return _Result([x.detach() for x in logits], long, gradients)


def _taken(p: nn.Parameter) -> Tensor | None:
    """Return a gradient in fp32, and free it."""
    gradient, p.grad = p.grad, None
    return None if gradient is None else gradient.float()


def _ours(ours: Decoder, family: Family, inputs: _Inputs) -> _Result:
    """Run our decoder over the packed documents."""
    ours.zero_grad()
    logits = _split(_logits(ours, *inputs.packed()), inputs)
    gradients: dict[str, Tensor] = {}
    if torch.is_grad_enabled():
        _objective(logits, inputs).backward()
        gradients = dict(own_gradients(ours, family))
    with torch.no_grad():
        long = _logits(ours, *_whole(inputs.long), inputs.kept)
    return _Result([x.detach() for x in logits], long, gradients)


def _objective(logits: Sequence[Tensor], inputs: _Inputs) -> Tensor:
    """Return what gradients are taken of."""
    return torch.stack([(a * b).sum() for a, b in zip(logits, inputs.upstream, strict=True)]).sum()


def _logits(ours: Decoder, tokens: Tensor, positions: Tensor, segments: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return the logits of one sequence [T, vocab], or of these of its positions."""
    return ours(tokens, positions, segments, lambda x, head: head.logits(x if kept is None else x[:, kept]))[0]


def _whole(document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, positions and segments of a document alone."""
    return document[None], torch.arange(len(document))[None], torch.zeros_like(document)[None]


def _split(logits: Tensor, inputs: _Inputs) -> list[Tensor]:
    """Return the logits of each document of the packed sequence."""
    lengths = [len(d) for d in inputs.documents]
    return list(logits[: sum(lengths)].split(lengths))


def _alone(ours: Decoder, result: _Result, inputs: _Inputs) -> float:
    """Return the largest difference of a document's logits alone from those in the packed sequence."""
    return _logit_error([_logits(ours, *_whole(d)) for d in inputs.documents], result.documents)


def _leak(ours: Decoder, result: _Result, inputs: _Inputs) -> float:
    """Return how much logits change with the tokens of every other document in the sequence."""
    tokens, positions, segments = inputs.packed()
    worst = 0.0
    for rest in (0, 1):
        others = torch.where(segments % 2 == rest, (tokens + 1) % ours.config.vocab, tokens)
        changed = _split(_logits(ours, others, positions, segments), inputs)
        worst = max(worst, _logit_error(changed[1 - rest :: 2], result.documents[1 - rest :: 2]))
    return worst


def _logit_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest magnitude."""
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, exact, strict=True))
    return worst / max(float(b.abs().max()) for b in exact)


def _distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, relative to that of the exact gradient."""
    norm, difference = float(exact.double().norm()), float((found.double() - exact.double()).norm())
    return difference / norm if norm else 0.0 if difference == 0 else float("inf")
