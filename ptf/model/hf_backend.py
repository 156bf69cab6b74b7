"""Any causal language model of transformers behind Decoder's interface (`model.backend: hf`), for architectures that
ptf does not define.

Each document stands alone in the batch that transformers computes, padded on the right. In a causal model no token
attends to padding on its right, and the documents of a batch are independent, whether tokens are mixed by
attention or by something else. A batch costs its number of documents × the longest of them. The head is taken from the
model and checked against the model's own logits when it is loaded, so a model that computes logits in another way is
refused instead of trained wrongly.

Left out: dropout (the model stays in evaluation mode, as ptf's own have none), the load-balancing loss of experts,
tensor parallelism, LoRA, heads and components of the user's own, added tokens, generation. Loading holds the whole
model in each process's memory; so does an export where transformers stores tensors in another form than it computes
with.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptf.errors import UserError, raise_if_custom_code
from ptf.model import bridge
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.decoder import HeadFn
from ptf.model.families import Family
from ptf.model.head import Head

# name of a factor of the logits in config.json → its exponent
SCALES = {"logit_scale": 1, "logits_scaling": -1}
TOLERANCE = 1e-5  # of the largest logit, fp32
ROUNDING = 1e-4  # of the largest hidden value: experts sum in another order when another token goes elsewhere
PROBE = 8  # tokens


class HFDecoder(nn.Module):
    """A model of transformers with the interface of Decoder."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.config = decoder_config(hf.config)
        self.scale = 1.0  # factor of the logits; `check` sets both
        self.softcap = None
        self.eval()

    def train(self, mode: bool = True) -> "HFDecoder":
        """Keep the evaluation mode, whatever `mode` is."""
        return super().train(False)

    @property
    def head(self) -> nn.Module:
        """The output projection of transformers' model."""
        return self.hf.get_output_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, which are sharded one by one."""
        return next(m for m in self.hf.modules() if isinstance(m, nn.ModuleList) and len(m) == self.config.num_layers)

    supports_shared_prefixes = False  # transformers computes whole documents only
    kernels: Mapping[str, str] = MappingProxyType({})  # of other packages (fused.py)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        head_fn: HeadFn,
        attend: None = None,
        pieces: object = None,
    ) -> Any:
        """Run the model and return `head_fn(hidden states [B, T, D], head)`; all tensors are [B, T].

        Positions count from 0 in every document of `segments`, which is what transformers assumes.
        """
        assert attend is None, "generation with a cache needs the native decoder or an engine"
        index, back = document_places(segments)
        if self.switches_at is not None:
            self._raise_if_mixed_lengths(segments, self.switches_at)
        hidden = self.hf.base_model(input_ids=tokens.reshape(-1)[index], use_cache=False)[0]  # [documents, longest, D]
        x = hidden.flatten(0, 1)[back].view(*tokens.shape, -1)
        return head_fn(x if self.scale == 1 else x * self.scale, self.output())

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

    def output(self) -> Head:
        """Return the head that `head_fn` is given. Call it inside `forward` only."""
        weight, bias = cast("Tensor", self.head.weight), getattr(self.head, "bias", None)
        scaled = bias if bias is None or self.scale == 1 else bias * self.scale
        return Head(weight, self.config.vocab, self.softcap, scaled)

    def load_balancing_loss(self) -> None:
        """Return None: there is no load-balancing loss."""

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in a checkpoint, whole tensor). Every rank must iterate."""
        from transformers.core_model_loading import WeightConverter, revert_weight_conversion

        if isinstance(self, FSDPModule):
            self.reshard()
        # tied tensors are listed under one name
        names = {n for n, _ in self.hf.named_parameters()} | {n for n, _ in self.hf.named_buffers()}
        stored = (
            (n, t.full_tensor() if isinstance(t, DTensor) else t) for n, t in self.hf.state_dict().items() if n in names
        )
        if any(isinstance(c, WeightConverter) for c in self.hf._weight_conversions or ()):
            yield from revert_weight_conversion(self.hf, dict(stored)).items()
        else:
            for name, tensor in stored:
                yield from revert_weight_conversion(self.hf, {name: tensor}).items()


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
            f"model.backend: hf: transformers has no such architecture: {directory}: {_first_line(error)}"
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


def build(directory: Path) -> tuple[HFDecoder, Family]:
    """Return a model of the right shape on the meta device, and an object that stands for its family."""
    from transformers import AutoModelForCausalLM

    c = configured(directory)
    with torch.device("meta"):
        model = HFDecoder(AutoModelForCausalLM.from_config(c, dtype=torch.float32, trust_remote_code=False))
    if model.head is None or not any(
        isinstance(m, nn.ModuleList) and len(m) == model.config.num_layers for m in model.hf.modules()
    ):
        raise UserError(
            f"model.backend: hf: {c.model_type}: there is no output projection, "
            f"or no list of {model.config.num_layers} layers, in transformers' model"
        )
    return model, Family(c.model_type, decoder_config, (), _no_random_members)


def _no_random_members(_: Any) -> dict[str, Any]:
    raise AssertionError("transformers' models are the reference; there is nothing to verify them against")


def load(model: HFDecoder, directory: Path, device: torch.device, *, random: bool, seed: int) -> None:
    """Give a (sharded) meta model memory and weights.

    Raise UserError that lists every missing, unexpected or misshapen tensor.
    """
    whole = _random_model(model.hf.config, seed) if random else _stored_model(directory)
    check(model, whole)
    tied: dict[int, str] = {}
    ties = [
        (name, tied[id(p)])
        for name, p in model.hf.named_parameters(remove_duplicate=False)
        if tied.setdefault(id(p), name) != name
    ]
    model.to_empty(device=device)
    for name, first in ties:
        _set_parameter(model.hf, name, model.hf.get_parameter(first))
    values = dict(whole.named_parameters())
    for name, parameter in model.hf.named_parameters():
        bridge.fill(parameter, values[name].detach().__getitem__)
    # one tensor may be two buffers, such as the frequencies of longrope and those that it returns to
    for name, buffer in whole.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        model.hf.get_submodule(owner)._buffers[leaf] = buffer.to(device)
    model.hf._weight_conversions = whole._weight_conversions if hasattr(whole, "_weight_conversions") else None
    check_assembled(model, whole)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter by its dotted name, bypassing registration."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter


def _random_model(c: Any, seed: int) -> Any:
    """Return transformers' model of a config with random weights, drawn by seed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(c, dtype=torch.float32, trust_remote_code=False).eval()


def _stored_model(directory: Path) -> Any:
    """Return transformers' model of a directory, whole."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = {
        "dtype": torch.float32,
        "use_safetensors": True,
        "local_files_only": True,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, **settings)
        model, info = loaded
    except Exception as error:  # transformers raises a dozen kinds; each means that the weights cannot be read
        raise UserError(f"model.path: {directory} cannot be read: {_first_line(error)}") from error
    problems = [f"missing: {n}" for n in sorted(info["missing_keys"])] + [
        f"unexpected: {n}" for n in sorted(info["unexpected_keys"])
    ]
    problems += [
        f"wrong shape: {n} is {tuple(stored)}, the config says {tuple(wanted)}"
        for n, stored, wanted in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise UserError(f"model.path: {directory} does not fit its config.json:\n  " + "\n  ".join(problems))
    return model.eval()


@torch.no_grad()
def check(model: HFDecoder, whole: Any) -> None:
    """Set the scale and soft-cap of the logits, and compare logits with the model's own.

    Raise UserError for a model that computes them in another way, and for one that attends to later tokens.
    """
    c, name = whole.config, whole.config.model_type
    tokens = _probe(c, model.config.max_positions)
    hidden = whole.base_model(input_ids=tokens, use_cache=False)[0]
    logits = whole(input_ids=tokens, use_cache=False).logits.float()
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % c.vocab_size
    moved = (whole.base_model(input_ids=other, use_cache=False)[0] - hidden)[:, :-1].abs().max()
    if not float(moved) <= ROUNDING * float(hidden.abs().max()):
        raise UserError(
            f"model.backend: hf: {name} attends to later tokens; only causal language models can be trained"
        )
    model.softcap = getattr(c, "final_logit_softcapping", None)
    for key, power in SCALES.items():
        if factor := getattr(c, key, None):
            model.scale *= float(factor) ** power
    head = whole.get_output_embeddings()
    bias = getattr(head, "bias", None)
    ours = Head(head.weight, c.vocab_size, model.softcap, None if bias is None else bias * model.scale).logits(
        hidden * model.scale
    )
    if not float((ours - logits).abs().max()) <= TOLERANCE * float(logits.abs().max()):
        raise UserError(
            f"model.backend: hf: the logits of {name} are not its head applied to its hidden states; "
            "ptf cannot train it"
        )


@torch.no_grad()
def check_assembled(model: HFDecoder, whole: Any) -> None:
    """Compare the hidden states of the model that trains with those of the one that its tensors were copied from.

    Raise UserError where they differ, or, in a model that is sharded or on a GPU, where a buffer does: such a model has
    state that was not copied.
    """
    name = whole.config.model_type
    theirs = dict(whole.named_buffers(remove_duplicate=False))
    mine = dict(model.hf.named_buffers(remove_duplicate=False))
    wrong = sorted(
        n for n in mine.keys() | theirs.keys() if n not in mine or n not in theirs or _differ(mine[n], theirs[n])
    )
    # another device rounds otherwise, and may send tokens to other experts
    if not wrong and not isinstance(model, FSDPModule) and next(model.parameters()).device.type == "cpu":
        tokens = _probe(whole.config, model.config.max_positions)
        expected = whole.base_model(input_ids=tokens, use_cache=False)[0]
        got = model.hf.base_model(input_ids=tokens, use_cache=False)[0]
        if not float((got - expected).abs().max()) <= TOLERANCE * float(expected.abs().max()):
            wrong = ["its hidden states"]
    if wrong:
        raise UserError(
            f"model.backend: hf: {name} was not copied whole from transformers' model; these differ: {', '.join(wrong)}"
        )


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or not torch.equal(a.cpu(), b.cpu())


def _probe(c: Any, max_positions: int) -> Tensor:
    """Return the tokens that two models are compared with, [1, T]."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, c.vocab_size, (1, min(PROBE, max_positions)), generator=g)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
