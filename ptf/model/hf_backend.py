"""Any causal language model of transformers behind Decoder's interface (`model.backend: hf`), for architectures that
ptf does not define.

Each document stands alone in the batch that transformers computes, padded on the right. In a causal model no token
attends to padding on its right, and the documents of a batch are independent, whether tokens are mixed by
attention or by something else. A batch costs its number of documents × the longest of them. The head is taken from the
model and checked against the model's own logits when it is loaded, so a model that computes logits in another way is
refused instead of trained wrongly.

Parameters are made on the meta device, sharded, and filled slice by slice from the checkpoint (hf_weights.py). Buffers
are made by the model's constructor on the CPU and never pass through meta, which would lose those that no checkpoint
stores, such as rotary frequencies. Adapters (LoRA) go to transformers' own modules (hf_adapters.py); a scalar head is
that of transformers' `...ForSequenceClassification`.

Left out: dropout (the model stays in evaluation mode, as ptf's own have none), the load-balancing loss of experts,
tensor parallelism, heads and components of the user's own, adapters of experts that are stacked in one parameter,
weights in four bits, rankings (`evaluate.ranking`), the transports nccl and ipc of weights, `ptf plan`, `ptf chat` and
`ptf serve`. `model.init: random` makes the whole model in each process's memory.
"""

import contextlib
import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptf.errors import UserError, raise_if_custom_code
from ptf.model import bridge
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.decoder import HeadFn
from ptf.model.families import Family
from ptf.model.head import Head
from ptf.model.hf_adapters import PREFIX, adapt, merged, uncalled_kinds
from ptf.model.hf_weights import InMemory, fill_from, renamings, stored_groups
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora, adapter_names, adapters
from ptf.model.scalar import Scalar, is_scalar
from ptf.model.tensor_files import TensorFiles

# name of a factor of the logits in config.json → its exponent
SCALES = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
SOFTCAPS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
)  # names of the soft-cap of the logits
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest logit
# of the largest hidden value: experts sum in another order when another token goes elsewhere
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PROBE = 8  # tokens
# words of the names of sizes in config.json at which a model computes in another way, and the largest that is tried
BOUNDARIES, LARGEST = ("chunk", "block_size", "window"), 1024
# transformers' own code (without kernels) computes later chunks of these wrongly: 5.10, see benchmarks/hf_backend.py
WRONG_CHUNKS = {"nemotron_h", "zamba2"}
SCORE = "score"  # transformers' name of a scalar head


class HFDecoder(nn.Module):
    """A model of transformers with the interface of Decoder."""

    supports_shared_prefixes = False  # transformers computes whole documents only
    first, group = 0, None  # the head is never sharded over the vocabulary

    def __init__(self, hf: Any, head: Literal["lm", "scalar"] = "lm", lora: Lora | None = None) -> None:
        super().__init__()
        self.hf = hf
        self.config = replace(decoder_config(hf.config), head=head)
        self.factory = LayerFactory(lora=lora)
        self.scale = 1.0  # factor of the logits
        for key, power in SCALES.items():
            if head == "lm" and (factor := getattr(hf.config, key, None)):
                self.scale *= float(factor) ** power
        self.softcap = next((cap for key in SOFTCAPS if (cap := getattr(hf.config, key, None))), None)
        self.eval()

    def train(self, mode: bool = True) -> "HFDecoder":
        """Keep the evaluation mode, whatever `mode` is."""
        return super().train(False)

    @property
    def head(self) -> nn.Module:
        """The output projection of transformers' model."""
        return getattr(self.hf, SCORE) if self.config.head == "scalar" else self.hf.get_output_embeddings()

    @property
    def body(self) -> nn.Module:
        """The part of transformers' model that computes hidden states."""
        if self.hf.base_model is not self.hf:
            return self.hf.base_model
        return next(m for m in self.hf.children() if hasattr(m, "base_model_prefix"))  # its prefix names no module

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, which are sharded one by one."""
        return next(m for m in self.hf.modules() if isinstance(m, nn.ModuleList) and len(m) == self.config.num_layers)

    kernels: Mapping[str, str] = MappingProxyType({})  # of other packages (fused.py)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        head_fn: HeadFn,
        attend: None = None,
        varlen: object = None,
    ) -> Any:
        """Run the model and return `head_fn(hidden states [B, T, D], head)`; all tensors are [B, T].

        Positions count from 0 in every document of `segments`, which is what transformers assumes.
        """
        assert attend is None, "generation with a cache needs the native decoder or an engine"
        index, back = document_places(segments)
        if self.switches_at is not None:
            self._raise_if_mixed_lengths(segments, self.switches_at)
        hidden = self.body(input_ids=tokens.reshape(-1)[index], use_cache=False)[0]  # [documents, longest, D]
        head = self.output()
        x = hidden.flatten(0, 1)[back].view(*tokens.shape, -1).to(head.weight.dtype)  # some keep fp32 between layers
        return head_fn(x if self.scale == 1 else x * self.scale, head)

    @property
    def switches_at(self) -> int | None:
        """The number of tokens beyond which the rotary frequencies of all documents of a batch change, if they do."""
        parameters = getattr(self.hf.config, "rope_parameters", None) or {}
        by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
        found = [rope for rope in (parameters, *by_layer_type) if rope.get("rope_type") == "longrope"]
        limits = [rope.get("original_max_position_embeddings") for rope in found]
        return min((int(limit) for limit in limits if limit), default=None)

    def _raise_if_mixed_lengths(self, segments: Tensor, limit: int) -> None:
        lengths = segments[segments >= 0].unique_consecutive(return_counts=True)[1]
        lengths = lengths[lengths > 1]  # one token attends to itself with any frequencies
        if len(lengths) and int(lengths.min()) <= limit < int(lengths.max()):
            raise UserError(
                f"model.backend: hf: with longrope, transformers computes different logits for "
                f"documents of at most {limit} tokens if their batch has a longer one (here {int(lengths.max())}). "
                f"Train documents of at most {limit} tokens (data.seq_len: {limit}), or longer ones alone"
            )

    def output(self) -> Head | Scalar:
        """Return the head that `head_fn` is given. Call it inside `forward` only."""
        if self.config.head == "scalar":
            return Scalar(cast("Tensor", self.head.weight))
        weight, bias = cast("Tensor", self.head.weight), getattr(self.head, "bias", None)
        scaled = bias if bias is None or self.scale == 1 else bias * self.scale
        return Head(weight, self.config.vocab, self.softcap, scaled)

    def load_balancing_loss(self) -> None:
        """Return None: there is no load-balancing loss."""

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in a checkpoint, whole tensor), adapters merged. Every rank must iterate."""
        from transformers.core_model_loading import revert_weight_conversion

        if isinstance(self, FSDPModule):
            self.reshard()
        values, pairs = self._stored(), adapters(self)
        for group in stored_groups(self.hf, list(values)):
            yield from revert_weight_conversion(self.hf, {n: merged(self, pairs, n, values[n]) for n in group}).items()

    def hf_names(self) -> set[str]:
        """Return the names under which `hf_tensors` gives the tensors."""
        from transformers.core_model_loading import revert_weight_conversion

        values = self._stored()
        return {
            name
            for group in stored_groups(self.hf, list(values))
            for name in revert_weight_conversion(
                self.hf, {n: torch.empty_like(values[n], device="meta") for n in group}
            )
        }

    def load_hf_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the model from whole tensors under the names of `hf_tensors`. Raise KeyError for one that is missing."""
        _, problems = fill_from(self.hf, InMemory(tensors), self._adapter_names())
        if problems:
            raise KeyError("; ".join(problems))

    def renamed(self, names: Collection[str]) -> dict[str, str]:
        """Return the parameters that tensors of a checkpoint are, by the names there, without what is converted."""
        return {stored: name for name, stored in renamings(self.hf, names, self._adapter_names()).items()}

    def _adapter_names(self) -> set[str]:
        return {name.removeprefix(PREFIX) for name in adapter_names(self)}

    def _stored(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by transformers' names; tied ones are listed under one name."""
        names = {n for n, _ in self.hf.named_parameters()} | {n for n, _ in self.hf.named_buffers()}
        names -= self._adapter_names()
        return {n: t for n, t in self.hf.state_dict().items() if n in names}


def document_places(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index maps between the flat batch and the batch with one document on each line.

    The first is, for each place of [documents, longest], the flat index of its token; the second is, for each flat
    index, the place of its token. Filling repeats a document's last token; padding of the batch maps to an arbitrary
    place. Without a document the first token stands for one.
    """
    flat = segments.reshape(-1).cpu().numpy()
    starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 1))
    lengths = np.diff(starts, append=len(flat))
    real = flat[starts] >= 0
    starts, lengths = (starts[real], lengths[real]) if real.any() else (starts[:1], np.ones(1, np.int64))
    step = np.arange(lengths.max())
    index = starts[:, None] + np.minimum(step, lengths[:, None] - 1)
    inside = step < lengths[:, None]
    back = np.zeros(len(flat), np.int64)
    back[index[inside]] = np.flatnonzero(inside.reshape(-1))
    return torch.from_numpy(index).to(segments.device), torch.from_numpy(back).to(segments.device)


def decoder_config(c: Any) -> DecoderConfig:
    """Return the sizes of a model from transformers' config, without what makes the architecture."""
    heads = getattr(c, "num_attention_heads", None) or 1
    return DecoderConfig(
        vocab=c.vocab_size,
        dim=c.hidden_size,
        heads=heads,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        intermediate_size=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        norm_eps=0.0,
        max_positions=getattr(c, "max_position_embeddings", None) or 1 << 30,
        tied=c.tie_word_embeddings,
        layers=(Layer(Rope(0.0)),) * c.num_hidden_layers,
    )


def configured(directory: Path) -> Any:
    """Return transformers' config of a directory.

    Raise UserError, with the reason, for anything but a plain causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        c = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise_if_custom_code(directory, error)
        raise UserError(
            f"model.backend: hf: transformers has no such architecture: {directory}: {first_line(error)}"
        ) from error
    method = (getattr(c, "quantization_config", None) or {}).get("quant_method", "")
    faults = {
        f"it is quantised ({method}); use the checkpoint it was made from": bool(method),
        "it is multimodal, and only text can be trained": any(
            hasattr(c, f"{part}_config") for part in ("text", "vision", "audio")
        ),
        "it has an encoder; only causal language models can be trained": bool(getattr(c, "is_encoder_decoder", False)),
        "transformers has no causal language model of it": type(c) not in AutoModelForCausalLM._model_mapping,
    }
    if reasons := [fault for fault, present in faults.items() if present]:
        raise UserError(f"model.backend: hf: {directory} ({c.model_type}): {'; '.join(reasons)}")
    return c


def build(
    directory: Path, *, head: Literal["lm", "scalar"] | None = None, lora: Lora | None = None
) -> tuple[HFDecoder, Family]:
    """Return a model whose parameters are on the meta device, and an object that stands for its family.

    `head` is the kind of head; None takes that of the checkpoint. Raise UserError for a model that cannot be trained,
    and for an adapter that matches nothing.
    """
    c = configured(directory)
    head = head or ("scalar" if is_scalar(bridge.read_config(directory)) else "lm")
    with parameters_on_meta():
        hf = _model_class(c, head).from_config(c, dtype=torch.float32, trust_remote_code=False)
        model = HFDecoder(hf, head, lora)
        if lora is not None:
            adapt(model, lora)
    if model.head is None or not any(
        isinstance(m, nn.ModuleList) and len(m) == model.config.num_layers for m in model.hf.modules()
    ):
        raise UserError(
            f"model.backend: hf: {c.model_type}: there is no output projection, "
            f"or no list of {model.config.num_layers} layers, in transformers' model"
        )
    return model, Family(c.model_type, decoder_config, (), _no_random_members)


def _model_class(c: Any, head: str) -> Any:
    """Return transformers' class of models with this head; raise UserError if there is none."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if head == "lm":
        return AutoModelForCausalLM
    c.num_labels = 1
    if type(c) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"model.backend: hf: {c.model_type} has no scalar head (reward models, critics): transformers has no "
            "classifier of it"
        )
    return AutoModelForSequenceClassification


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Construct modules inside the `with` block with parameters on the meta device and buffers that hold values.

    `torch.device("meta")` would take the values of both. A parameter has memory until it is registered.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _no_random_members(_: Any) -> dict[str, Any]:
    raise AssertionError("transformers' models are the reference; there is nothing to verify them against")


def load(model: HFDecoder, directory: Path, device: torch.device, *, random: bool, seed: int) -> tuple[str, ...]:
    """Give a (sharded) model memory and weights, each process reading only what it owns, and check what it computes.

    Return the names of tensors that the checkpoint lacks because a scalar head is new: these are drawn from `seed`.
    Raise UserError that lists every missing, unexpected or misshapen tensor.
    """
    ties = _ties(model.hf)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for name, first in ties:
        _set_parameter(model.hf, name, model.hf.get_parameter(first))
    if random:
        whole = _random_model(model, seed)
        new: tuple[str, ...] = ()
        _, problems = fill_from(model.hf, InMemory(whole.state_dict()), model._adapter_names(), converted=False)
    else:
        with TensorFiles(directory) as files:
            try:
                new, problems = fill_from(
                    model.hf, files, model._adapter_names(), lacks=_head_names(model), ignores=_other_heads(model)
                )
            except SafetensorError as error:
                raise UserError(f"model.path: {directory} cannot be read: {error}") from error
    if problems:
        raise UserError(f"model.path: {directory} does not fit its config.json:\n  " + "\n  ".join(problems))
    for name in new:
        _initialise(name, model.hf.get_parameter(name), model.hf.config, seed)
    bridge.init_adapters(cast("Any", model), seed)
    check(model)
    return new


def vocabulary_tables(model: HFDecoder) -> dict[str, str]:
    """Return which tensors, by transformers' names, have a row for each token: name → `embed`, `head` or `bias`."""
    found, embed = {}, model.hf.get_input_embeddings()
    for which, module in (("embed", embed), ("head", model.head)):
        path = next(path for path, m in model.hf.named_modules() if m is module)
        found[f"{path}.weight"] = "embed" if module.weight is embed.weight else which
        if getattr(module, "bias", None) is not None:
            found[f"{path}.bias"] = "bias"
    return found


def _ties(hf: nn.Module) -> list[tuple[str, str]]:
    """Return (name, first name) of each parameter that is another one's."""
    first: dict[int, str] = {}
    return [
        (name, first[id(p)])
        for name, p in hf.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    ]


def _head_names(model: HFDecoder) -> frozenset[str]:
    """Return the tensors that a checkpoint may lack: those of a new scalar head."""
    return frozenset({f"{SCORE}.weight"} if model.config.head == "scalar" else ())


def _other_heads(model: HFDecoder) -> Any:
    """Return whether a stored tensor belongs to a head that this model does not have, by transformers' name."""
    body = next(path for path, module in model.hf.named_modules() if module is model.body) + "."
    if model.config.head == "scalar":
        return lambda name: not name.startswith(body)
    return lambda name: name == f"{SCORE}.weight"


def _initialise(name: str, parameter: Tensor, c: Any, seed: int) -> None:
    """Draw a new parameter, by seed and name, so that sharding changes nothing."""
    key = int.from_bytes(hashlib.sha256(f"init/{seed}/{name}".encode()).digest()[:8], "little") >> 1
    std = getattr(c, "initializer_range", None) or 0.02
    values = torch.empty(parameter.shape).normal_(0, std, generator=torch.Generator().manual_seed(key))
    bridge.fill(parameter, values.__getitem__)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter by its dotted name, bypassing registration."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter


def _random_model(model: HFDecoder, seed: int) -> Any:
    """Return transformers' model of a config with random weights, drawn by seed."""
    c = model.hf.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _model_class(c, model.config.head).from_config(c, dtype=torch.float32, trust_remote_code=False)


@torch.no_grad()
def check(model: HFDecoder) -> None:
    """Compare what the assembled model computes with what transformers' own forward pass of it returns.

    Every rank calls it. Raise UserError for a tensor without a value, for buffers other than the constructor's, for a
    model that attends to later tokens, computes logits in another way than ptf or changes its weights while it computes
    (RWKV), and for an adapter without effect.
    """
    name, c = model.hf.config.model_type, model.hf.config
    raise_if_without_values(model)
    device = next(model.parameters()).device
    if name in WRONG_CHUNKS and not (device.type == "cuda" and _has_kernels(model.hf)):
        raise UserError(
            f"model.backend: hf: without the kernels of mamba-ssm on a GPU, transformers computes {name} wrongly "
            "beyond one chunk: what it computes of a token depends on the tokens after it"
        )
    part, whole = probe_lengths(model)
    tokens = _probe(c, whole).to(device)
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: called.add(path))  # type: ignore[misc]
        for path, module in model.hf.named_modules()
        if getattr(module, "adapters", None)
    ]

    def compare(x: Tensor, head: Head | Scalar) -> tuple[float, float, torch.dtype]:
        theirs = model.hf(input_ids=tokens, use_cache=False).logits.float()
        ended = model.body(input_ids=tokens[:, :part], use_cache=False)[0] * model.scale
        moved = (x[:, :part] - ended).abs().amax(-1)[0] / x.abs().max()  # [part]
        ours = head.values(x[:, -1]) if isinstance(head, Scalar) else head.logits(x)
        apart = (ours - theirs.view(ours.shape)).abs().max() / theirs.abs().max()
        # rounding to 16 bits may send some tokens to other experts
        most = moved.max() if head.weight.dtype == torch.float32 else moved.median()
        return float(most), float(apart), head.weight.dtype

    before = [_version(p) for p in model.parameters()]
    positions = torch.arange(tokens.shape[1], device=device)[None]
    moved, apart, dtype = model(tokens, positions, torch.zeros_like(positions), compare)
    for hook in hooks:
        hook.remove()
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
    if [_version(p) for p in model.parameters()] != before:
        raise UserError(f"model.backend: hf: {name} changes its weights in a forward pass; ptf cannot train it")
    if not moved <= ROUNDING[dtype]:
        raise UserError(
            f"model.backend: hf: in {name} later tokens change what is computed of earlier ones; only causal language "
            "models can be trained"
        )
    if not apart <= TOLERANCE[dtype]:
        raise UserError(
            f"model.backend: hf: the logits of {name} are not its head applied to its hidden states; "
            "ptf cannot train it"
        )
    if kinds := uncalled_kinds(model, called):
        raise UserError(
            f"model.lora.targets: {', '.join(kinds)}: transformers' {name} computes with these weights directly, so an "
            "adapter beside them would have no effect; give targets without them"
        )


def raise_if_without_values(model: HFDecoder) -> None:
    """Raise UserError for tensors on the meta device, and for buffers other than the model's constructor makes.

    Buffers that a checkpoint stores are as it stores them.
    """
    hf = model.hf
    with parameters_on_meta():
        fresh = dict(type(hf)(hf.config).named_buffers(remove_duplicate=False))
    mine, stored = dict(hf.named_buffers(remove_duplicate=False)), hf.state_dict().keys()
    wrong = [n for n, t in hf.named_parameters() if t.is_meta]
    wrong += sorted(
        n
        for n in mine.keys() | fresh.keys()
        if n not in mine or n not in fresh or mine[n].is_meta or (n not in stored and _differ(mine[n], fresh[n]))
    )
    if wrong:
        raise UserError(
            f"model.backend: hf: {hf.config.model_type} was not assembled as transformers does it; these tensors have "
            f"other values: {', '.join(wrong)}"
        )


def _version(parameter: Tensor) -> int:
    """Return how often a parameter, or this rank's part of it, was changed in place."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter)._version


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or not torch.equal(a.cpu(), b.to("cpu", a.dtype))


def _has_kernels(hf: Any) -> bool:
    return bool(getattr(sys.modules[type(hf).__module__], "is_fast_path_available", False))


def probe_lengths(model: HFDecoder) -> tuple[int, int]:
    """Return two lengths of sequences, the second longer, beyond the sizes at which the model computes otherwise."""
    sizes = {
        value
        for key, value in model.hf.config.to_dict().items()
        if any(word in key for word in BOUNDARIES) and isinstance(value, int) and 1 < value <= LARGEST
    }
    size = max(sizes, default=32)
    most = min(model.config.max_positions, model.switches_at or 1 << 30)
    return min(size + PROBE // 2, most - 1), min(2 * size + PROBE, most)


def _probe(c: Any, length: int) -> Tensor:
    """Return a sequence of tokens that two forward passes are compared with, [1, T], without padding tokens."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, c.vocab_size, (1, length), generator=g)
    pad = getattr(c, "pad_token_id", None)
    return tokens if pad is None else torch.where(tokens == pad, (tokens + 1) % c.vocab_size, tokens)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
