"""The gate for a model family: our decoder against transformers' on small random members of it, and an export against the run that made it.

The one idea: everything is compared under Hugging Face's names and from one saved checkpoint, so a mistake anywhere (config mapping, op,
layer, attention mask) shows as a number, with the first place where the two computations part.
"""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptf.errors import UserError, refuse_custom_code
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, Family, family_of
from ptf.model.layers import Parts
from ptf.model.tensor_files import TensorFiles

TOLERANCE = 1e-5  # of the largest magnitude, fp32
LENGTHS = (1, 37, 5, 52, 18)  # documents, packed into rows of 64
WIDTH = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One config, compared. Errors are relative to the largest magnitude of the reference."""

    config: dict[str, Any]
    logits: float = float("inf")
    gradients: float = float("inf")
    worst_gradient: str = ""
    diverges: str = ""  # the first place where the two part, if they do
    problems: tuple[str, ...] = ()  # tensors that do not map, or do not come back as they were

    @property
    def passed(self) -> bool:
        return self.logits <= TOLERANCE and self.gradients <= TOLERANCE and not self.problems


@dataclass(slots=True)
class Report:
    model: str
    cases: list[Case] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(c.passed for c in self.cases)


def verify(
    family_or_directory: str,
    configs: int = 12,
    seed: int = 0,
    change: Callable[[Decoder], Any] | None = None,
    until_failure: bool = False,
    progress: Callable[[Case], Any] = lambda case: None,
) -> Report:
    """Compare `configs` random members of a family, or the checkpoint in a directory. `change` is applied to our model after loading (to see
    that a mistake is caught); `progress` is called after each. Raises UserError for what is neither, and for a checkpoint that transformers
    itself cannot load."""
    _quiet()
    report = Report(family_or_directory)
    if family_or_directory not in MODULES:
        directory = Path(family_or_directory)
        if not (directory / "config.json").is_file():
            raise UserError(f"{family_or_directory} is neither a directory with a config.json nor a family: {', '.join(MODULES)}")
        report.cases.append(compare(directory, _loaded(directory), change))
        progress(report.cases[-1])
        return report
    family = family_of({"model_type": family_or_directory})
    for number in range(configs):
        config = family.small(random.Random(f"{family_or_directory}/{seed}/{number}"))
        with tempfile.TemporaryDirectory() as directory:
            model = random_reference(config, seed * 1000 + number)
            model.save_pretrained(directory)  # type: ignore[operator]
            report.cases.append(compare(Path(directory), model, change))
        progress(report.cases[-1])
        if until_failure and not report.cases[-1].passed:
            break
    return report


def _quiet() -> None:
    """No progress bars and no advice about configs that are small on purpose."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def reference(directory: Path) -> nn.Module:
    """transformers' model of a checkpoint, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if hasattr(AutoConfig.from_pretrained(directory, trust_remote_code=False), "text_config") else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)


def _loaded(directory: Path) -> nn.Module:
    try:
        return reference(directory)
    except Exception as error:  # transformers raises a dozen kinds; each means that there is nothing to compare with
        refuse_custom_code(directory, error)
        raise UserError(f"{directory}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from error


def random_reference(config: dict[str, Any], seed: int) -> nn.Module:
    """transformers' model of a config.json, every parameter drawn so that each matters to the result."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    hf = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if hasattr(hf, "text_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(hf, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1:
                    p.add_(0.3 * torch.randn_like(p))
                else:
                    wide = 3 if "gate_up_proj" in name and config["model_type"] == "gpt_oss" else 0.8  # so that its clamp is reached
                    p.normal_(0, 0.03 if "embed" in name else wide * p.shape[-1] ** -0.5)  # small embeddings make the norms' epsilon matter
    return model


def packed() -> tuple[Tensor, Tensor]:
    """Positions and segments of the documents, [rows, WIDTH]: as many to a row as fit, padding after them."""
    rows: list[list[int]] = [[]]
    for number, n in enumerate(LENGTHS):
        if len(rows[-1]) + n > WIDTH:
            rows.append([])
        rows[-1] += [number] * n
    segments = torch.tensor([row + [-1] * (WIDTH - len(row)) for row in rows])
    positions = torch.zeros_like(segments)
    for number, n in enumerate(LENGTHS):
        positions[segments == number] = torch.arange(n)
    return positions, segments


def compare(directory: Path, hf: nn.Module, change: Callable[[Decoder], Any] | None = None) -> Case:
    config = bridge.read_config(directory)
    try:
        ours, family = bridge.build(directory)
        bridge.materialize(ours, torch.device("cpu"))
        bridge.load_hf(ours, directory, family)
        problems = round_trip(ours, family, directory)
        if change is not None:
            change(ours)
        return _compare(config, ours, family, hf, problems)
    except (UserError, AssertionError) as error:  # a setting, a tensor, or a parameter without an op
        return Case(config, problems=tuple(str(error).splitlines()))


def _compare(config: dict[str, Any], ours: Decoder, family: Family, hf: nn.Module, problems: Sequence[str]) -> Case:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, ours.config.vocab, (n,), generator=generator) for n in LENGTHS]
    upstream = [torch.randn(n, ours.config.vocab, generator=generator) for n in LENGTHS]
    positions, segments = packed()
    tokens = torch.zeros_like(segments)
    for number, document in enumerate(documents):
        tokens[segments == number] = document
    hf.eval()
    hf.zero_grad()
    hf.get_input_embeddings().padding_idx = None  # type: ignore[operator]  it would take the gradient from one row
    theirs = _watched(hf, _their_places(hf), lambda: [hf(input_ids=d[None]).logits[0].float() for d in documents])
    mine = _watched(ours, _our_places(ours), lambda: ours(tokens, positions, segments, lambda x, head: head.logits(x)))
    alone = ours(documents[1][None], torch.arange(LENGTHS[1])[None], torch.zeros(1, LENGTHS[1], dtype=torch.long), lambda x, head: head.logits(x))[0]
    logits = [mine.result[segments == number] for number in range(len(LENGTHS))]
    scale = max(float(t.detach().abs().max()) for t in theirs.result)
    error = max(float((a - b).detach().abs().max()) for a, b in zip([*logits, alone], [*theirs.result, theirs.result[1]], strict=True)) / scale
    torch.stack([(a * b).sum() for a, b in zip(theirs.result, upstream, strict=True)]).sum().backward()
    ours.zero_grad()
    torch.stack([(a * b).sum() for a, b in zip(logits, upstream, strict=True)]).sum().backward()
    gradient, worst = _gradients(ours, family, hf)
    diverges = "" if error <= TOLERANCE else first_difference(mine.seen, theirs.seen, segments)
    return Case(config, error, gradient, worst, diverges, tuple(problems))


@torch.no_grad()
def _gradients(ours: Decoder, family: Family, hf: nn.Module) -> tuple[float, str]:
    """The largest relative error of a gradient, and its tensor. Where all are small they are measured against 1 % of the largest of the model."""
    for p in hf.parameters():
        p.data, p.grad = torch.zeros_like(p) if p.grad is None else p.grad, None
    with tempfile.TemporaryDirectory() as directory:
        hf.save_pretrained(directory)  # type: ignore[operator]
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()}
        with TensorFiles(Path(directory), family.aliases) as files:
            read = lambda name: files.read(name, tuple(slice(0, n) for n in files.shape(name)))  # noqa: E731
            pairs = [(name, value, read(name)) for name, value in bridge.under_hf_names(found, ours, family)]
    floor = 1e-2 * max(float(b.abs().max()) for _, _, b in pairs)
    errors = {name: float((a - b).abs().max()) / max(floor, float(b.abs().max())) for name, a, b in pairs}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def round_trip(ours: Decoder, family: Family, directory: Path) -> list[str]:
    """What differs after Hugging Face → ptf → Hugging Face, tensor by tensor, byte by byte."""
    with tempfile.TemporaryDirectory() as base:
        back = Path(base) / "back"
        bridge.save_hf(bridge.hf_tensors(ours, family), directory, back, writes=True)
        with TensorFiles(directory, family.aliases) as before, TensorFiles(back, family.aliases) as after:
            problems = [f"lost: {n}" for n in sorted(before.names - after.names)] + [f"new: {n}" for n in sorted(after.names - before.names)]
            for name in sorted(before.names & after.names):
                part = tuple(slice(0, n) for n in before.shape(name))
                if not torch.equal(before.read(name, part), after.read(name, part)):
                    problems.append(f"changed: {name}")
    return problems


@dataclass(slots=True)
class _Watched:
    result: Any
    seen: dict[str, list[Tensor]]  # place → its output, call by call


def _watched(model: nn.Module, places: dict[str, nn.Module], run: Callable[[], Any]) -> _Watched:
    seen: dict[str, list[Tensor]] = {place: [] for place in places}

    def hook(place: str) -> Callable[..., None]:
        return lambda module, args, output: seen[place].append((output[0] if isinstance(output, tuple) else output).detach())

    handles = [module.register_forward_hook(hook(place)) for place, module in places.items()]
    try:
        return _Watched(run(), seen)
    finally:
        for handle in handles:
            handle.remove()


def _our_places(model: Decoder) -> dict[str, nn.Module]:
    places: dict[str, nn.Module] = {}
    for i, layer in enumerate(model.layers):
        places |= {f"layer {i}, attention": layer.attn, f"layer {i}, mlp": layer.mlp or layer.moe, f"layer {i}, output": layer}  # type: ignore[dict-item]
    return places


def _their_places(model: nn.Module) -> dict[str, nn.Module]:
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    places: dict[str, nn.Module] = {}
    for i, layer in enumerate(layers):
        places |= {f"layer {i}, attention": layer.self_attn, f"layer {i}, mlp": layer.mlp, f"layer {i}, output": layer}  # type: ignore[dict-item]
    return places


def first_difference(mine: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]], segments: Tensor) -> str:
    for place, outputs in mine.items():
        for number, b in enumerate(theirs.get(place, ())):
            a, b = outputs[0][segments == number], b.reshape(-1, b.shape[-1])
            if a.shape != b.shape:
                return f"{place}: shape {tuple(a.shape)} instead of {tuple(b.shape)}"
            error = float((a - b).abs().max() / b.abs().max())
            if not error <= TOLERANCE:
                return f"{place}: {error:.1e} (document of {len(a)} tokens)"
    return "after the last layer (final norm, head or soft-capping)"


def as_json(report: Report) -> str:
    cases = [
        {"logits": c.logits, "gradients": c.gradients, "worst_gradient": c.worst_gradient, "diverges": c.diverges, "problems": c.problems, "config": c.config}
        for c in report.cases
    ]
    return json.dumps({"model": report.model, "passed": report.passed, "tolerance": TOLERANCE, "cases": cases})


@torch.no_grad()
def export_difference(directory: Path, tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    """Largest |log-prob(transformers, loaded from `directory`) − log-prob(the trained model)| over a probe of n tokens, n − 1 log-probs."""
    ids = torch.tensor([list(tokens)])
    logits = reference(directory)(input_ids=ids).logits[0, :-1].float()
    found = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return float((found - torch.tensor(logprobs)).abs().max())


@torch.no_grad()
def head_difference(directory: Path, tokens: Sequence[int], values: Sequence[Any], parts: Parts) -> float:
    """As `export_difference`, of what another head than the vocabulary's says at each of n tokens: [n, …]. A scalar one is read as
    AutoModelForSequenceClassification does, after each of the prefixes that it reads whole; a declared one is loaded from its own file and given
    transformers' hidden states."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    _quiet()
    ids, wanted = torch.tensor([list(tokens)]), torch.tensor(values)
    if not parts.pattern("head"):
        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
        ends = [n for n in range(1, len(tokens) + 1) if tokens[n - 1] != model.config.pad_token_id]  # there it would look further back
        found = torch.stack([model(input_ids=ids[:, :n]).logits[0, 0] for n in ends])
        return float((found - wanted[[n - 1 for n in ends]]).abs().max())
    ours, family = bridge.build(directory, parts=parts)
    bridge.materialize(ours, torch.device("cpu"))
    bridge.load_hf(ours, directory, family)
    body = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
    hidden = body(input_ids=ids).last_hidden_state
    return float((ours.head(hidden)[0].float() - wanted).abs().max())
