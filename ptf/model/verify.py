"""Verification of a model family: our decoder against transformers' on small random members of it, and of an export
against the run that made it.

Everything is compared under Hugging Face's names and from one saved checkpoint, so a mistake anywhere (config mapping,
tensor mapping, layer, attention mask) shows as a number, with the first module whose outputs differ.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ptf.errors import UserError
from ptf.model import bridge, matrix_product
from ptf.model.config import DecoderConfig, Rope
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, Family, family_of
from ptf.model.layers import LayerFactory
from ptf.model.rope import rotary
from ptf.model.rounding import Double, Margins
from ptf.model.tensor_files import TensorFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ptf.model.parallel_parity import ParallelCase

TOLERANCE = 1e-5  # of the largest magnitude, fp32
# Two computations in fp32, each within the tolerance of the exact result, differ by twice the tolerance at most.
ROUNDING = 2 * TOLERANCE
LENGTHS = (1, 37, 5, 52, 18)  # documents, packed into sequences of 64
SEQ_LEN = 64
DRAWS = 8  # of tokens, at most
PROMPT = 8  # tokens of the prompt of a generation
BALANCE = 10.0  # weight of the load-balancing loss beside the logits, in the gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a comparison with transformers found. Errors are relative to the largest magnitude of the reference."""

    beside_fp32: float | None = None  # the largest error beside the reference in fp32, where one in fp64 was needed
    problems: tuple[str, ...] = ()  # tensors that do not map, or change on the way back

    @property
    def errors(self) -> tuple[float, ...]:
        """The errors, each of which must be within the tolerance."""
        raise NotImplementedError

    @property
    def largest(self) -> float:
        """The largest error; infinite if one is not a number."""
        return max(self.errors) if all(error < float("inf") for error in self.errors) else float("inf")

    @property
    def passed(self) -> bool:
        """Whether all errors are within the tolerance, and there are no problems."""
        return self.largest <= TOLERANCE and not self.problems


Compared = TypeVar("Compared", bound=Comparison)


@dataclass(frozen=True, slots=True)
class Case(Comparison):
    """The comparison of one config."""

    config: dict[str, Any]
    logits: float = float("inf")
    gradients: float = float("inf")
    worst_gradient: str = ""
    diverges: str = ""  # the first module whose outputs differ, if any
    balance: float = 0.0  # error of the load-balancing loss of experts
    redrawn: int = 0  # draws of tokens for which the reference chooses between nearly equal scores

    @property
    def errors(self) -> tuple[float, ...]:
        """The errors of logits, gradients and the load-balancing loss."""
        return self.logits, self.gradients, self.balance


@dataclass(slots=True)
class Report:
    """The comparisons of one family."""

    model: str
    cases: list[Case] = field(default_factory=list)
    parallel: list["ParallelCase"] = field(default_factory=list)  # on two ranks (parallel_parity.py)

    @property
    def passed(self) -> bool:
        """Whether there is a comparison and all of them passed."""
        return bool(self.cases) and all(c.passed for c in (*self.cases, *self.parallel))


def verify(
    name: str,
    configs: int = 12,
    seed: int = 0,
    change: Callable[[Decoder], Any] | None = None,
    until_failure: bool = False,
    progress: Callable[[Case], Any] = lambda case: None,
) -> Report:
    """Compare `configs` random members of a family with transformers.

    `change` is applied to our model after loading (to test that a mistake is caught); `progress` is called after each
    comparison. Raise UserError for a name that is no family.
    """
    quiet()
    report = Report(name)
    if name not in MODULES:
        raise UserError(f"{name} is neither a directory with a config.json nor a family: {', '.join(MODULES)}")
    family = family_of({"model_type": name})
    for number in range(configs):
        config = family.random_config(random.Random(f"{name}/{seed}/{number}"))
        with tempfile.TemporaryDirectory() as directory:
            model = random_reference(config, seed * 1000 + number)
            model.save_pretrained(directory)
            report.cases.append(compare(Path(directory), model, change))
        progress(report.cases[-1])
        if until_failure and not report.cases[-1].passed:
            break
    return report


def quiet() -> None:
    """Switch off progress bars, and warnings about configs that are small on purpose."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Return transformers' model of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = (
        AutoModelForImageTextToText
        if hasattr(AutoConfig.from_pretrained(directory, trust_remote_code=False), "text_config")
        else AutoModelForCausalLM
    )
    model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    return corrected(model)


def exact_reference(directory: Path) -> "PreTrainedModel":
    """Return transformers' model of a checkpoint in fp64, in which it computes under `Double`, its rotary frequencies
    included."""
    hf = reference(directory).double()
    with Double():
        for module in list(hf.modules()):
            own = dict(module.named_buffers(recurse=False))
            if hasattr(module, "config") and any(name.endswith("inv_freq") for name in own):
                for name, buffer in type(module)(module.config).named_buffers():
                    setattr(module, name, buffer)
    hf.set_experts_implementation("eager")  # the grouped product knows no fp64
    return hf


def corrected(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return transformers' model with its known mistakes corrected.

    5.10 scales the rotary frequencies of all layers of OLMo 3, of which only the full-attention layers have scaled
    ones (https://github.com/huggingface/transformers/pull/45945).
    """
    config: Any = model.config
    if config.model_type != "olmo3" or hasattr(model.base_model, "rotary_embs"):
        return model
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = Rope(config.rope_parameters["rope_theta"])

    def unscaled(layer: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = (table[:, :, 0] for table in rotary(named["position_ids"], head_dim, plain))
        sin = sin.chunk(2, -1)[1].repeat(1, 1, 2)  # transformers' have no sign
        return args, {**named, "position_embeddings": (cos, sin)}

    for layer, kind in zip(cast("Any", model.base_model).layers, config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(unscaled, with_kwargs=True)
    return model


def random_reference(config: dict[str, Any], seed: int) -> "PreTrainedModel":
    """Return transformers' model of a config.json, every parameter drawn so that each matters to the result."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    hf = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if hasattr(hf, "text_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(hf, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("A_log"):  # states that last for many tokens: otherwise they hardly matter
                    p.normal_(-3, 0.5)
                elif p.dim() == 1:
                    p.add_(0.3 * torch.randn_like(p))
                else:
                    # wide enough that the clamp is reached
                    wide = 3 if "gate_up_proj" in name and config["model_type"] == "gpt_oss" else 0.8
                    wide = 0.5 if "conv1d" in name else wide
                    # small embeddings make the norms' epsilon matter; OLMo projects them as they are, and beside the
                    # biases its gradients would be rounding
                    embedding = 0.3 if config["model_type"] in ("olmo2", "olmo3") else 0.03
                    p.normal_(0, embedding if "embed" in name else wide * p.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # which is drawn to change the choice of experts
                    buffer.normal_(0, 0.2)
    return corrected(model)


def packed() -> tuple[Tensor, Tensor]:
    """Return positions and segments of the documents, [sequences, SEQ_LEN].

    A sequence has as many documents as fit, and padding after them.
    """
    sequences: list[list[int]] = [[]]
    for number, n in enumerate(LENGTHS):
        if len(sequences[-1]) + n > SEQ_LEN:
            sequences.append([])
        sequences[-1] += [number] * n
    segments = torch.tensor([ids + [-1] * (SEQ_LEN - len(ids)) for ids in sequences])
    positions = torch.zeros_like(segments)
    for number, n in enumerate(LENGTHS):
        positions[segments == number] = torch.arange(n)
    return positions, segments


@dataclass(frozen=True, slots=True)
class _Probe:
    """Random documents, and the gradients of their logits; packed as in `packed`."""

    documents: list[Tensor]
    upstream: list[Tensor]
    tokens: Tensor  # [sequences, SEQ_LEN], as are
    positions: Tensor
    segments: Tensor

    @staticmethod
    def drawn(vocab: int, seed: int) -> "_Probe":
        """Draw the documents' tokens."""
        generator = torch.Generator().manual_seed(seed)
        documents = [torch.randint(0, vocab, (n,), generator=generator) for n in LENGTHS]
        upstream = [torch.randn(n, vocab, generator=generator) for n in LENGTHS]
        positions, segments = packed()
        tokens = torch.zeros_like(segments)
        for number, document in enumerate(documents):
            tokens[segments == number] = document
        return _Probe(documents, upstream, tokens, positions, segments)


@matrix_product.left_to_torch()
def compare(directory: Path, hf: "PreTrainedModel", change: Callable[[Decoder], Any] | None = None) -> Case:
    """Compare our decoder with transformers' model `hf` of the same directory.

    Tokens for which the reference chooses experts by a margin within the tolerance are drawn again, DRAWS times at
    most: either choice is right. Rounding does not decide either (`judged`).
    """
    config = bridge.read_config(directory)
    try:
        ours, family = bridge.build(directory)
        bridge.materialize(ours, torch.device("cpu"))
        bridge.load_hf(ours, directory, family)
        problems = round_trip(ours, family, directory)
        if change is not None:
            change(ours)
        probe, theirs, redrawn = _clear_choices(hf, ours.config)

        def exactly() -> Case:
            double = exact_reference(directory)
            exact = _run_reference(double, ours.config, probe, Double())
            return _compare(config, ours, family, double, problems, probe, exact)

        case = judged(_compare(config, ours, family, hf, problems, probe, theirs), exactly)
        return replace(case, redrawn=redrawn)
    except (UserError, AssertionError) as error:  # a setting, a tensor, or a parameter without a mapping
        return Case(config, problems=tuple(str(error).splitlines()))


def judged(case: Compared, exactly: Callable[[], Compared]) -> Compared:
    """Return the comparison, or the one beside transformers in fp64 that `exactly` makes, if rounding decided.

    It did if the largest error is above the tolerance, but no more than two results can differ that are both within it,
    and the comparison in fp64 passes, with the same tolerance.
    """
    if case.passed or case.problems or not case.largest <= ROUNDING:
        return case
    exact = exactly()
    return replace(exact, beside_fp32=case.largest) if exact.passed else case


def _clear_choices(hf: "PreTrainedModel", config: DecoderConfig) -> tuple[_Probe, "_Recording", int]:
    """Return a probe for which the reference chooses no expert by a margin within the tolerance, the reference's run
    over it, and the number of draws before it. The last draw is returned whatever its margins are."""
    draw = 0
    while True:
        probe, margins = _Probe.drawn(config.vocab, draw), Margins()
        theirs = _run_reference(hf, config, probe, margins)
        if margins.smallest > TOLERANCE or draw + 1 == DRAWS:
            return probe, theirs, draw
        draw += 1


def _run_reference(
    hf: "PreTrainedModel", config: DecoderConfig, probe: _Probe, mode: AbstractContextManager[Any]
) -> "_Recording":
    """Run transformers' model over each document alone, and record it."""
    hf.eval()
    hf.zero_grad()
    cast("nn.Embedding", hf.get_input_embeddings()).padding_idx = None  # it would zero one row's gradient
    arguments = {"use_cache": False, **router_arguments(config.experts)}
    with mode:
        return _record(hf, _their_modules(hf), lambda: [hf(input_ids=d[None], **arguments) for d in probe.documents])


def _compare(
    config: dict[str, Any],
    ours: Decoder,
    family: Family,
    hf: "PreTrainedModel",
    problems: Sequence[str],
    probe: _Probe,
    theirs: "_Recording",
) -> Case:
    """Compare logits and gradients over packed documents, and over one document alone, with the reference's run
    `theirs` over them. The parameters of `hf` are lost."""
    their_loss, their_logits = their_balance(hf, theirs.result), [out.logits[0] for out in theirs.result]
    packs = probe.tokens, probe.positions, probe.segments
    mine = _record(ours, _our_modules(ours), lambda: ours(*packs, lambda x, head: head.logits(x)))
    loss = ours.load_balancing_loss()
    problems = [*problems, *_coefficients(ours, hf, their_loss)]
    alone = ours(
        probe.documents[1][None],
        torch.arange(LENGTHS[1])[None],
        torch.zeros(1, LENGTHS[1], dtype=torch.long),
        lambda x, head: head.logits(x),
    )[0]
    logits = [mine.result[probe.segments == number] for number in range(len(LENGTHS))]
    scale = max(float(t.detach().abs().max()) for t in their_logits)
    pairs = zip([*logits, alone], [*their_logits, their_logits[1]], strict=True)
    error = max(float((a - b).detach().abs().max()) for a, b in pairs) / scale
    balance = 0.0
    ends = [
        torch.stack([(a * b).sum() for a, b in zip(t, probe.upstream, strict=True)]).sum()
        for t in (their_logits, logits)
    ]
    if loss is not None and their_loss is not None:
        balance = float((loss - their_loss).detach().abs() / their_loss.detach().abs())
        ends = [end + BALANCE * each for end, each in zip(ends, (their_loss, loss), strict=True)]
    ours.zero_grad()
    for end in ends:
        end.backward()
    gradient, worst = _gradients(ours, family, hf)
    diverges = "" if error <= TOLERANCE else first_difference(mine.outputs, theirs.outputs, probe.segments)
    return Case(config, error, gradient, worst, diverges, balance, problems=tuple(problems))


def router_arguments(experts: int) -> dict[str, Any]:
    """Return the arguments with which transformers returns what its routers compute."""
    return {"output_router_logits": True} if experts else {}


def their_balance(hf: "PreTrainedModel", outputs: Sequence[Any]) -> Tensor | None:
    """Return transformers' load-balancing loss over these outputs; None if the family has none."""
    compute = getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
    logits = [getattr(out, "router_logits", None) for out in outputs]
    if compute is None or not all(logits):
        return None
    c = hf.config.get_text_config()
    layers = tuple(torch.cat(each) for each in zip(*logits, strict=True))
    return compute(layers, getattr(c, "num_experts", None) or c.num_local_experts, c.num_experts_per_tok)


def _coefficients(ours: Decoder, hf: "PreTrainedModel", balance: Tensor | None) -> list[str]:
    """Return what differs in the weight of the load-balancing loss, which no logit shows."""
    theirs = getattr(hf.config.get_text_config(), "router_aux_loss_coef", None)
    if balance is None or theirs is None or ours.config.moe is None:
        return []
    mine = ours.config.moe.router_aux_loss_coef
    return [] if mine == theirs else [f"router_aux_loss_coef is {mine} instead of {theirs}"]


def vocabulary(hf: "PreTrainedModel") -> int:
    """Return the size of the vocabulary of transformers' model."""
    return hf.config.get_text_config().vocab_size


@torch.no_grad()
def _gradients(ours: Decoder, family: Family, hf: "PreTrainedModel") -> tuple[float, str]:
    """Return the largest relative error of a gradient, and its tensor."""
    theirs = stored_gradients(hf, family, [p.grad for p in hf.parameters()])
    return gradient_error((name, value, theirs[name]) for name, value in own_gradients(ours, family))


@torch.no_grad()
def own_gradients(ours: Decoder, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield our decoder's gradients under the names of a checkpoint."""
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()}
    # transformers saves each expert by itself, also of a checkpoint that has them stacked
    family = replace(family, mappings=family.per_expert or family.mappings)
    yield from bridge.under_hf_names(gradients, ours, family)


@torch.no_grad()
def stored_gradients(hf: "PreTrainedModel", family: Family, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the gradients of transformers' parameters under the names of a checkpoint. The parameters are lost."""
    for p, gradient in zip(hf.parameters(), gradients, strict=True):
        p.data, p.grad = torch.zeros_like(p) if gradient is None else gradient, None
    for buffer in hf.buffers():
        buffer.zero_()  # some are saved with the parameters, and have no gradient
    with tempfile.TemporaryDirectory() as directory:
        hf.save_pretrained(directory)
        with TensorFiles(Path(directory), family.aliases) as files:
            return {n: files[n] for n in files.names}


def gradient_error(gradients: Iterable[tuple[str, Tensor, Tensor]]) -> tuple[float, str]:
    """Return the largest error of a gradient, and its tensor, of (name, ours, theirs).

    An error is relative to the tensor's largest gradient, or to 1 % of the model's largest where that is more.
    """
    pairs = list(gradients)
    floor = 1e-2 * max(float(b.abs().max()) for _, _, b in pairs)
    errors = {name: float((a - b).abs().max()) / max(floor, float(b.abs().max())) for name, a, b in pairs}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def round_trip(ours: Decoder, family: Family, directory: Path) -> list[str]:
    """Return what differs after Hugging Face → ptf → Hugging Face, tensor by tensor, byte by byte."""
    with tempfile.TemporaryDirectory() as base:
        back = Path(base) / "back"
        bridge.save_hf(bridge.hf_tensors(ours, family), directory, back, writes=True)
        with TensorFiles(directory, family.aliases) as before, TensorFiles(back, family.aliases) as after:
            problems = [f"lost: {n}" for n in sorted(before.names - after.names)] + [
                f"new: {n}" for n in sorted(after.names - before.names)
            ]
            for name in sorted(before.names & after.names):
                if not torch.equal(before[name], after[name]):
                    problems.append(f"changed: {name}")
    return problems


@dataclass(slots=True)
class _Recording:
    """The result of a run, and the outputs of some modules during it."""

    result: Any
    outputs: dict[str, list[Tensor]]  # name of a module → its outputs, call by call


def _record(model: nn.Module, modules: dict[str, nn.Module], run: Callable[[], Any]) -> _Recording:
    """Run a function and record the outputs of these modules."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in modules}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs[name].append(
            (output[0] if isinstance(output, tuple) else output).detach()
        )

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        return _Recording(run(), outputs)
    finally:
        for handle in handles:
            handle.remove()


def _our_modules(model: Decoder) -> dict[str, nn.Module]:
    """Return the modules of our decoder to compare, by name."""
    modules: dict[str, Any] = {}
    for i, layer in enumerate(model.layers):
        modules |= {
            f"layer {i}, attention": layer.attn,
            f"layer {i}, mlp": layer.mlp or layer.moe,
            f"layer {i}, output": layer,
        }
    return modules


def _their_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the corresponding modules of transformers' model, of those that it calls by these names."""
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    modules: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        attention = layer.linear_attn if hasattr(layer, "linear_attn") else getattr(layer, "self_attn", None)
        parts = {"attention": attention, "mlp": getattr(layer, "mlp", None), "output": layer}
        modules |= {f"layer {i}, {part}": module for part, module in parts.items() if module is not None}
    return modules


def first_difference(mine: dict[str, list[Tensor]], theirs: dict[str, list[Tensor]], segments: Tensor) -> str:
    """Return the name of the first module whose outputs differ, and by how much."""
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
    """Return the report as JSON."""
    cases = [
        {
            "logits": c.logits,
            "gradients": c.gradients,
            "worst_gradient": c.worst_gradient,
            "diverges": c.diverges,
            "balance": c.balance,
            "redrawn": c.redrawn,
            "beside_fp32": c.beside_fp32,
            "problems": c.problems,
            "config": c.config,
        }
        for c in report.cases
    ]
    found = {"model": report.model, "passed": report.passed, "tolerance": TOLERANCE, "cases": cases}
    return json.dumps(found | {"parallel": [asdict(c) for c in report.parallel]})


@torch.no_grad()
def export_difference(
    directory: Path, tokens: Sequence[int], logprobs: Sequence[float], stops: Sequence[int] = ()
) -> float:
    """Return the largest |log-prob(transformers, loaded from `directory`) − log-prob(the trained model)|.

    It is taken over a probe of n tokens, whose n − 1 log-probs of the trained model are `logprobs`. Raises UserError
    if generation does not end at each of `stops`.
    """
    model = reference(directory)
    ids = torch.tensor([list(tokens)])
    if running_on := [stop for stop in stops if not _ends_at(model, ids[:, :PROMPT], stop)]:
        raise UserError(
            f"not published: with the files in {directory}, transformers goes on after the ids {running_on}, with "
            "which responses ended in training; name them in eos_token_id of its generation_config.json"
        )
    return float((_logprobs_by(model, tokens) - torch.tensor(logprobs)).abs().max())


@torch.no_grad()
def reference_logprobs(directory: Path, tokens: Sequence[int]) -> Tensor:
    """Return the log-probs of tokens 1…n−1 in transformers' model of a directory."""
    return _logprobs_by(reference(directory), tokens)


def _logprobs_by(model: "PreTrainedModel", tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor([list(tokens)])
    logits = model(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def _ends_at(model: "PreTrainedModel", prompt: Tensor, stop: int) -> bool:
    """Return whether greedy generation, with the model's own settings, ends where its first token is made `stop`."""
    quiet()
    first = prompt.shape[1]

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        return scores if ids.shape[1] != first else torch.full_like(scores, -torch.inf).index_fill(1, stop_id, 0.0)

    stop_id = torch.tensor([stop])
    made = cast(Any, model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=2,
        logits_processor=[forced],
    )
    return made.shape[1] == first + 1


@torch.no_grad()
def head_difference(directory: Path, tokens: Sequence[int], values: Sequence[Any], factory: LayerFactory) -> float:
    """Return the largest difference of a head that is not the vocabulary's, over a probe of n tokens.

    `values` [n, …] are the trained model's. A scalar head is read as AutoModelForSequenceClassification does: after
    each prefix, and at the ends of two texts, the probe and its first half, which the published tokenizer pads. A head
    of the user's own is loaded from its file and given transformers' hidden states.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    quiet()
    ids, wanted = torch.tensor([list(tokens)]), torch.tensor(values)
    if not factory.pattern("head"):
        model = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        corrected(model)
        theirs = [model(input_ids=ids[:, :n]).logits[0, 0] for n in range(1, len(tokens) + 1)]
        two = [list(tokens), list(tokens[: len(tokens) // 2])]
        batch = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).pad(
            {"input_ids": two}, return_tensors="pt"
        )
        theirs += list(model(**batch).logits[:, 0])
        wanted = torch.cat([wanted, wanted[[len(text) - 1 for text in two]]])
        return float((torch.stack(theirs) - wanted).abs().max())
    ours, family = bridge.build(directory, factory=factory)
    bridge.materialize(ours, torch.device("cpu"))
    bridge.load_hf(ours, directory, family)
    body = AutoModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    hidden = corrected(body)(input_ids=ids).last_hidden_state
    return float((ours.head(hidden)[0].float() - wanted).abs().max())
