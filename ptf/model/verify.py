"""Verification beside transformers: of a model family by small random members of it, and of a checkpoint by its own
weights.

Weights magnify rounding, and no fixed bound knows by how much. So transformers computes the exact result in fp64, and
our error beside it may be at most `FACTOR` times that of transformers in fp32; of a checkpoint the same in bf16,
without gradients. Where transformers itself is too far from the exact result, nothing is judged. Everything is compared
under Hugging Face's names and from one saved checkpoint, so a mistake anywhere (config mapping, tensor mapping, layer,
attention mask) shows as a number, with the first module whose outputs differ.
"""

import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ptf.errors import UserError, first_line, raise_if_custom_code
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, family_of
from ptf.model.kernels.choice import TORCH
from ptf.model.layers import LayerFactory
from ptf.model.model_files import read_config
from ptf.model.model_writer import save_hf
from ptf.model.reference import exact_reference, quiet, random_reference, reference
from ptf.model.rounding import FACTOR, Double, Margins
from ptf.model.tensor_files import HEADS, TensorFiles

LEAST = 1e-6  # what transformers' error counts as at least
LOGITS, GRADIENTS = 1e-4, 1e-3  # largest errors in fp32 that are judged: of the largest logit, and of a gradient's norm
MEMBER_LEAST, MEMBER = 2.5e-6, 2e-5  # the same of random weights: ours is up to 4.5 max(1e-6, theirs) in 444 members
TIE = 1e-5  # margin of a choice of experts that rounding may decide
# Of the random tokens, at most, until transformers alone is within the bounds: a few tokens magnify rounding a
# hundredfold. In Qwen2.5-Coder-0.5B its error is 1.0e-4 (logits) and 1.3e-3 (a gradient) with seed 0, less with seed 1.
DRAWS = 8
LENGTHS = (1, 37, 5, 52, 18)  # documents of random tokens, packed into sequences of 64
SEQ_LEN = 64
LONG, LONGEST = 1024, 4096  # tokens of a checkpoint's long document: at least, and at most
KEPT = 256  # positions of the long document whose logits are compared
BALANCE = 10.0  # weight of the load-balancing loss beside the logits, in the gradients
ROWS = (
    "What is the capital of France, and which river runs through it?",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n",
    "A train leaves at 9:40 and needs 2 h 35 min for 310 km. When does it arrive, and how fast is it?",
    "Übersetze ins Englische: Der Bäcker verkauft morgens frisches Brot. 然后把它翻译成中文。",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, 2, 3], "unit": "°C"}}',
)


@dataclass(frozen=True, slots=True)
class Deviation:
    """One comparison with the exact result."""

    what: str
    theirs: float  # error of transformers
    ours: float
    tolerance: float  # of our error
    verdict: str  # "pass", "fail", or "cannot judge" where transformers is too far from the exact result
    place: str = ""  # the first module whose outputs differ, where logits do

    @property
    def passed(self) -> bool:
        """Whether our error is within the tolerance."""
        return self.verdict == "pass"


def judged(what: str, theirs: float, ours: float, bound: float = MEMBER, least: float = MEMBER_LEAST) -> Deviation:
    """Return what is found of two errors: transformers' counts as `least` at least, and up to `bound` it is judged."""
    tolerance = min(FACTOR * max(theirs, least), bound)
    verdict = "cannot judge" if not theirs <= bound else "pass" if ours <= tolerance else "fail"
    return Deviation(what, theirs, ours, tolerance, verdict)


def closest(findings: Iterable[Deviation]) -> Deviation:
    """Return the one that is closest to its tolerance, or beyond it."""
    return max(findings, key=lambda f: (not f.passed, f.ours / f.tolerance))


@dataclass(frozen=True, slots=True)
class Case:
    """The comparison of one model; of its gradients the one that is closest to its tolerance, or beyond it.

    The last finding is the first that did not pass.
    """

    config: dict[str, Any]
    findings: tuple[Deviation, ...] = ()
    problems: tuple[str, ...] = ()  # tensors that do not map, or change on the way back
    notes: tuple[str, ...] = ()  # what was drawn again or not compared
    mesh: str = ""  # of two ranks (parallel_parity.py)

    @property
    def passed(self) -> bool:
        """Whether there are findings, all passed, and there are no problems."""
        return bool(self.findings) and all(f.passed for f in self.findings) and not self.problems


def verify(
    name: str, configs: int = 12, seed: int = 0, change: Callable[[Decoder], Any] | None = None
) -> Iterator[Case]:
    """Compare `configs` random members of a family with transformers.

    `change` is applied to our model after loading (to test that a mistake is caught). Raise UserError for a name that
    is no family.
    """
    quiet()
    if name not in MODULES:
        raise UserError(f"{name} is neither a directory with a config.json nor a family: {', '.join(MODULES)}")
    family = family_of({"model_type": name})
    for number in range(configs):
        config = family.random_config(random.Random(f"{name}/{seed}/{number}"))
        with tempfile.TemporaryDirectory() as directory:
            random_reference(config, seed * 1000 + number).save_pretrained(directory)
            yield Reference(Path(directory), member=True).compare(change)


def packed(lengths: Sequence[int] = LENGTHS, seq_len: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    """Return positions and segments of documents, [sequences, seq_len].

    A sequence has as many documents as fit, and padding after them.
    """
    sequences: list[list[int]] = [[]]
    for number, n in enumerate(lengths):
        if len(sequences[-1]) + n > seq_len:
            sequences.append([])
        sequences[-1] += [number] * n
    segments = torch.tensor([ids + [-1] * (seq_len - len(ids)) for ids in sequences])
    positions = torch.zeros_like(segments)
    for number, n in enumerate(lengths):
        positions[segments == number] = torch.arange(n)
    return positions, segments


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Documents, of which gradients are taken, and of a checkpoint a long one."""

    vocab: int
    rows: tuple[Tensor, ...] = ()  # real documents
    long: Tensor | None = None
    kept: Tensor | None = None  # positions of the long document
    notes: tuple[str, ...] = ()
    documents: tuple[Tensor, ...] = ()  # random tokens of LENGTHS, then the real rows
    upstream: tuple[Tensor, ...] = ()  # gradients of their logits

    @staticmethod
    def of(directory: Path) -> "_Inputs":
        c, notes = bridge.decoder_config(directory), []
        reach = max(max(layer.window or 0, layer.rope.original_positions) for layer in c.layers)
        tokens = min(max(LONG, reach + reach // 8 + 1), LONGEST, c.max_positions)
        if (directory / "tokenizer.json").is_file():
            rows, long = _encoded(directory, tokens)
        else:
            rows, long = [], torch.randint(0, c.vocab, (tokens,), generator=torch.Generator().manual_seed(1))
            notes.append("there is no tokenizer.json: no real rows, and the long document is of random tokens")
        if len(long) <= reach:
            notes.append(f"not compared: what a window or context of {reach:,} tokens changes beyond {len(long):,}")
        kept = torch.linspace(0, len(long) - 1, min(KEPT, len(long))).long()
        return _Inputs(c.vocab, tuple(row[: c.max_positions] for row in rows), long, kept, tuple(notes))

    def drawn(self, seed: int) -> "_Inputs":
        generator = torch.Generator().manual_seed(seed)
        tokens = [torch.randint(0, self.vocab, (n,), generator=generator) for n in LENGTHS]
        upstream = [torch.randn(len(d), self.vocab, generator=generator) for d in (*tokens, *self.rows)]
        return replace(self, documents=(*tokens, *self.rows), upstream=tuple(upstream))

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and segments: those of a checkpoint in one sequence with padding at its end."""
        lengths = [len(d) for d in self.documents]
        positions, segments = packed(lengths, SEQ_LEN if self.long is None else sum(lengths) + 7)
        tokens = torch.zeros_like(segments)
        for number, document in enumerate(self.documents):
            tokens[segments == number] = document
        return tokens, positions, segments


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
    code = "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("*at*.py")))
    return rows, torch.tensor(tokenizer.encode(code, add_special_tokens=False)[:tokens])


@dataclass(frozen=True, slots=True)
class _Result:
    """What a model computes, as far as it did."""

    documents: Sequence[Tensor] = ()  # logits [T, vocab] of random documents, then of real rows
    long: tuple[Tensor, Tensor] | None = None  # logits [KEPT, vocab], and cosines of the first layer's positions
    gradients: Mapping[str, Tensor] = field(default_factory=dict)  # by the tensor's name
    balance: float | None = None  # the load-balancing loss of experts
    outputs: Mapping[str, list[Tensor]] = field(default_factory=dict)  # of modules, document by document

    def logit_errors(self, exact: "_Result", error: Callable[..., float]) -> dict[str, float]:
        """Return the errors of logits, and of the load-balancing loss."""
        n, found = len(LENGTHS), {}
        if self.documents:
            found["random tokens"] = error(self.documents[:n], exact.documents[:n])
        if self.documents[n:]:
            found["real rows"] = error(self.documents[n:], exact.documents[n:])
        if self.long and exact.long:
            found["long document"] = error([self.long[0]], [exact.long[0]])
        if self.balance is not None and exact.balance is not None:
            found["load-balancing loss"] = abs(self.balance - exact.balance) / abs(exact.balance)
        return found


class Reference:
    """What transformers computes of a checkpoint, exactly and with rounding: made once, for any number of comparisons.

    One model is in memory at a time. Raise UserError for a checkpoint that transformers cannot load. Of a random
    `member` of a family only logits and gradients of random tokens are compared, in fp32; under `torch.no_grad` no
    gradients are.

    Random tokens are drawn again where transformers alone is beyond the bounds on them, and where it chooses a member's
    experts by a margin within rounding (either choice is right): DRAWS times at most.
    """

    def __init__(self, directory: Path, member: bool = False) -> None:
        from transformers import AutoConfig

        quiet()
        self.directory, self.member, self.config = directory, member, read_config(directory)
        self.least, self.logits, self.gradients = (
            (MEMBER_LEAST, MEMBER, MEMBER) if member else (LEAST, LOGITS, GRADIENTS)
        )
        self.errors_bf16: dict[str, float] = {}
        family_of(self.config)  # raises UserError for a checkpoint of no family
        exact_long = long = None
        try:
            self.hf_config = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
            inputs = _Inputs(self.hf_config.vocab_size) if member else _Inputs.of(directory)
            self.notes = [*inputs.notes]
            for draw in range(DRAWS):
                self.inputs, self.exact, rounded = inputs.drawn(draw), _Result(), _Result()  # frees those before
                margins = Margins()
                self.exact = _theirs(exact_reference(directory), self.inputs, exact_long, Double(), margins)
                rounded = _theirs(reference(directory), self.inputs, long)
                self.errors = self._errors(rounded)
                exact_long, long = self.exact.long, rounded.long
                if not (why := self._unclear(margins)):
                    break
                self.notes.append(f"draw {draw + 1} of random tokens: {why}")
        except UserError:
            raise
        except Exception as error:  # transformers raises a dozen kinds; each means that nothing can be compared
            raise_if_custom_code(directory, error)
            raise UserError(f"{directory}: transformers cannot load it: {first_line(error)}") from error
        if not member:
            with torch.no_grad():
                rounded = _theirs(reference(directory, torch.bfloat16), self.inputs)
            self.errors_bf16 = self._errors_bf16(rounded)

    def _errors(self, result: _Result) -> dict[str, float]:
        exact = {name: self.exact.gradients[name] for name in result.gradients}
        gradients = (
            gradient_errors(result.gradients, exact)
            if self.member and exact
            else {name: _distance(gradient, exact[name]) for name, gradient in result.gradients.items()}
        )
        return result.logit_errors(self.exact, logit_error) | {f"gradient of {n}": e for n, e in gradients.items()}

    def _errors_bf16(self, result: _Result) -> dict[str, float]:
        """Return the mean errors of logits in bf16. They are too large to show frequencies rounded to bf16; the cosines
        of positions do, where a family has them in transformers' layout."""
        (_, found), (_, exact) = cast("Any", (result.long, self.exact.long))
        known = {"positions": logit_error([found], [exact])} if found.shape == exact.shape else {}
        return result.logit_errors(self.exact, _mean_error) | known

    def _bound(self, name: str) -> float:
        return self.gradients if name.startswith("gradient of ") else self.logits

    def _unclear(self, margins: Margins) -> str:
        """Return why these random tokens cannot be judged, if others could be."""
        if self.member and margins.smallest <= TIE:
            return f"transformers chooses experts by a margin of {margins.smallest:.1e}"
        wrong = {name: e / self._bound(name) for name, e in self.errors.items() if not e <= self._bound(name)}
        if not wrong or wrong.keys() & {"real rows", "long document"}:
            return ""
        name = max(wrong, key=wrong.__getitem__)
        return f"transformers' own error is {self.errors[name]:.2e}, above {self._bound(name):g} ({name})"

    def compare(self, change: Callable[[Decoder], Any] | None = None) -> Case:
        """Compare our decoder, to which `change` is applied after loading (to test that a mistake is caught)."""
        found: list[Deviation] = []
        try:
            ours = bridge.load(self.directory, factory=LayerFactory(kernels=TORCH))
            problems = round_trip(ours, self.directory) if change is None else []
            # no logit shows the weight of the load-balancing loss
            theirs, moe = getattr(self.hf_config, "router_aux_loss_coef", None), ours.config.moe
            known = self.exact.balance is not None and theirs is not None
            if known and moe is not None and moe.router_aux_loss_coef != theirs:
                problems.insert(0, f"router_aux_loss_coef is {moe.router_aux_loss_coef} instead of {theirs}")
            if change is not None:
                change(ours)
            for finding in self._findings(ours):
                found.append(finding)
                if not finding.passed:
                    break
        except (UserError, AssertionError) as error:  # a setting, a tensor, or a parameter without a mapping
            problems = str(error).splitlines()
        return Case(self.config, tuple(found), tuple(problems), tuple(self.notes))

    def _findings(self, ours: Decoder) -> Iterator[Deviation]:
        tokens, positions, segments = self.inputs.packed()
        computed, outputs = _record(_modules(ours.layers), lambda: _logits(ours, tokens, positions, segments))
        logits, balance = self._split(computed), ours.load_balancing_loss()
        loss = None if balance is None else float(balance.detach())
        for finding in self._judged(_Result([x.detach() for x in logits], balance=loss)):
            differ = not finding.passed and "loss" not in finding.what
            place = first_difference(outputs, self.exact.outputs, segments, finding.tolerance) if differ else ""
            yield replace(finding, place=place)
        if torch.is_grad_enabled():
            end = torch.stack([(a * b).sum() for a, b in zip(logits, self.inputs.upstream, strict=True)]).sum()
            if balance is not None and self.exact.balance is not None:
                end = end + BALANCE * balance
            ours.zero_grad()
            end.backward()
            yield closest(self._judged(_Result(gradients=own_gradients(ours))))
        if self.member:
            return
        with torch.no_grad():
            yield from self._judged(_Result(long=self._long(ours)))
            # experts compute tokens of all documents together, in as many rows as there are
            least = FACTOR * max(self.errors["random tokens"], LEAST) if ours.config.moe else 0.0
            leak = 0.0  # how much logits change with the tokens of every other document in the sequence
            for rest in (0, 1):
                others = torch.where(segments % 2 == rest, (tokens + 1) % ours.config.vocab, tokens)
                changed = self._split(_logits(ours, others, positions, segments))
                leak = max(leak, logit_error(changed[1 - rest :: 2], [x.detach() for x in logits[1 - rest :: 2]]))
            yield Deviation("fp32, leak between documents", 0.0, leak, least, "pass" if leak <= least else "fail")
            ours.bfloat16()
            result = _Result(self._split(_logits(ours, tokens, positions, segments)), self._long(ours))
            for name, error in self._errors_bf16(result).items():
                yield judged(f"bf16, {name}", self.errors_bf16[name], error, float("inf"), LEAST)

    def _judged(self, result: _Result) -> Iterator[Deviation]:
        for name, error in self._errors(result).items():
            yield judged(f"fp32, {name}", self.errors[name], error, self._bound(name), self.least)

    def _split(self, logits: Tensor) -> list[Tensor]:
        """Return the logits of each document of the packed sequences."""
        segments = self.inputs.packed()[2]
        return [logits[segments == number] for number in range(len(self.inputs.documents))]

    def _long(self, ours: Decoder) -> tuple[Tensor, Tensor]:
        long = cast(Tensor, self.inputs.long)[None]
        inputs = long, torch.arange(long.shape[1])[None], torch.zeros_like(long), self.inputs.kept
        return _with_cosines(ours.layers[0], lambda: _logits(ours, *inputs)[0])


def _theirs(
    hf: Any,
    inputs: _Inputs,
    long: tuple[Tensor, Tensor] | None = None,
    *modes: AbstractContextManager[Any],
) -> _Result:
    """Run transformers' model over each document alone; `long` is given where it is known. Its parameters are lost."""
    hf.eval()
    cast("nn.Embedding", hf.get_input_embeddings()).padding_idx = None  # it would zero one row's gradient
    sums, gradients, balance = dict[Tensor, Tensor](), {}, None

    def run() -> list[Tensor]:
        logits = []
        for document, upstream in zip(inputs.documents, inputs.upstream, strict=True):
            logits.append(hf(input_ids=document[None], use_cache=False).logits[0])
            if torch.is_grad_enabled():  # document by document: the graph of one is in memory
                (logits[-1] * upstream).sum().backward()
            logits[-1] = logits[-1].detach()
        return logits

    def add(p: Tensor) -> None:  # in fp32: gradients in fp64 would take as much memory as the weights
        gradient, p.grad = cast(Tensor, p.grad), None
        sums[p] = sums[p].add_(gradient) if p in sums else gradient.to(torch.float32)

    for p in hf.parameters():
        p.register_post_accumulate_grad_hook(add)
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        logits, outputs = _record(_modules(_layers(hf)), run)
        if torch.is_grad_enabled() and (balance := their_balance(hf, inputs.documents)) is not None:
            (BALANCE * balance).backward()
        if inputs.long is not None and long is None:
            with torch.no_grad():
                arguments = {"input_ids": inputs.long[None], "use_cache": False, "logits_to_keep": inputs.kept}
                long = _with_cosines(_layers(hf)[0], lambda: hf(**arguments).logits[0])
    if torch.is_grad_enabled():
        gradients = stored_gradients(hf, [sums.get(p) for p in hf.parameters()])
    sums.clear()  # the parameters' hooks hold it, and it them
    return _Result(logits, long, gradients, None if balance is None else float(balance.detach()), outputs)


def their_balance(hf: Any, documents: Iterable[Tensor]) -> Tensor | None:
    """Return transformers' load-balancing loss over documents; None if the family has none."""
    compute = getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
    if compute is None:
        return None
    outputs = [hf(input_ids=d[None], use_cache=False, output_router_logits=True) for d in documents]
    if not all(logits := [getattr(out, "router_logits", None) for out in outputs]):
        return None
    c = hf.config.get_text_config()
    layers = tuple(torch.cat(each) for each in zip(*logits, strict=True))
    return compute(layers, getattr(c, "num_experts", None) or c.num_local_experts, c.num_experts_per_tok)


def _logits(ours: Decoder, tokens: Tensor, positions: Tensor, segments: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return the logits of sequences [B, T, vocab], or of these of their positions."""
    return ours(tokens, positions, segments, lambda x, head: head.logits(x if kept is None else x[:, kept]))


@torch.no_grad()
def own_gradients(ours: Decoder) -> dict[str, Tensor]:
    """Return our decoder's gradients under the names of a checkpoint."""
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()}
    return dict(ours.under_hf_names(gradients.__getitem__))


@torch.no_grad()
def stored_gradients(hf: Any, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the gradients of transformers' parameters under the names of a checkpoint. The parameters are lost."""
    for p, gradient in zip(hf.parameters(), gradients, strict=True):
        p.data, p.grad = torch.zeros_like(p) if gradient is None else gradient, None
    for buffer in hf.buffers():
        buffer.zero_()  # some are saved with the parameters, and have no gradient
    with tempfile.TemporaryDirectory() as directory:
        hf.save_pretrained(directory)
        with TensorFiles(Path(directory), family_of(hf.config.to_dict()).aliases) as files:
            return {n: files[n] for n in files.names}


def logit_error(found: Iterable[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest magnitude."""
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, exact, strict=True))
    return worst / max(float(b.abs().max()) for b in exact)


def _mean_error(found: Iterable[Tensor], exact: Sequence[Tensor]) -> float:
    return _distance(torch.cat([x.double() for x in found]), torch.cat([x.double() for x in exact]))


def _distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, relative to that of the exact result."""
    norm, difference = float(exact.norm(dtype=torch.float64)), float((found.double() - exact).norm())
    return difference / norm if norm else 0.0 if difference == 0 else float("inf")


def gradient_errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference in each gradient of a random member, relative to the tensor's largest gradient, or
    to 1 % of the model's largest where that is more."""
    largest = {name: float(gradient.abs().max()) for name, gradient in exact.items()}
    least = 1e-2 * max(largest.values())
    return {n: float((g - exact[n]).abs().max()) / max(least, largest[n]) for n, g in found.items()}


def round_trip(ours: Decoder, directory: Path) -> list[str]:
    """Return what differs after Hugging Face → ptf → Hugging Face, tensor by tensor, byte by byte."""
    with tempfile.TemporaryDirectory() as base:
        back = Path(base) / "back"
        save_hf(ours.hf_tensors(), directory, back, writes=True, carried=ours.carried(directory))
        aliases = ours.family.aliases
        with TensorFiles(directory, aliases) as before, TensorFiles(back, aliases) as after:
            # a tied checkpoint may store its embedding twice
            lost = {n for n in before.names - after.names if not (ours.config.tied and f".{n}".endswith(HEADS))}
            problems = [f"lost: {n}" for n in sorted(lost)]
            problems += [f"new: {n}" for n in sorted(after.names - before.names)]
            problems += [
                f"changed: {n}" for n in sorted(before.names & after.names) if not torch.equal(before[n], after[n])
            ]
    return problems


def _record(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> tuple[Any, dict[str, list[Tensor]]]:
    """Return the result of a run, and the outputs of these modules during it, call by call."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in modules}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs[name].append(
            (output[0] if isinstance(output, tuple) else output).detach()
        )

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_hook(hook(name)))
        return run(), outputs


def _with_cosines(layer: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the result of a run, and the cosines of positions that a layer is called with in it."""
    seen: list[Tensor] = []
    with layer.register_forward_pre_hook(
        lambda _, args, named: seen.append((named.get("position_embeddings") or args[1])[0].flatten()), with_kwargs=True
    ):
        return run(), seen[0]


def _layers(hf: nn.Module) -> list[nn.Module]:
    return [m for m in hf.modules() if type(m).__name__.endswith("DecoderLayer")]


def _modules(layers: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of our layers to compare, by name, or the corresponding ones of transformers'."""
    modules: dict[str, nn.Module] = {}
    for i, layer in enumerate(layers):
        parts = dict(layer.named_children())
        for what, names in (("attention", ("attn", "linear_attn", "self_attn")), ("mlp", ("mlp", "moe"))):
            modules |= {f"layer {i}, {what}": parts[name] for name in names if parts.get(name) is not None}
        modules[f"layer {i}, output"] = layer
    return modules


def first_difference(
    mine: Mapping[str, list[Tensor]], theirs: Mapping[str, list[Tensor]], segments: Tensor, tolerance: float
) -> str:
    """Return the name of the first module whose outputs differ by more, and by how much."""
    for place, outputs in mine.items():
        for number, b in enumerate(theirs.get(place, ())):
            a, b = outputs[0][segments == number], b.reshape(-1, b.shape[-1])
            if a.shape != b.shape:
                return f"{place}: shape {tuple(a.shape)} instead of {tuple(b.shape)}"
            error = float((a - b).abs().max() / b.abs().max())
            if not error <= tolerance:
                return f"{place}: {error:.1e} (document of {len(a)} tokens)"
    return "after the last layer (final norm, head or soft-capping)"
