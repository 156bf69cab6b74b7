"""Checks of the assembled model (`model.backend: hf`) against transformers' own forward pass, before anything is
trained."""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ptf.errors import UserError
from ptf.model.head import Head, Scalar
from ptf.model.hf_adapters import uncalled_kinds
from ptf.model.hf_language_model import applied_to_logits, is_multimodal
from ptf.model.hf_weights import parameters_on_meta

if TYPE_CHECKING:
    from ptf.model.hf_backend import HFDecoder

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest logit
# of the largest hidden value: experts sum in another order when another token goes elsewhere
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PROBE = 8  # tokens
# in messages of operators that do not take tensors of a dtype, or of two
UNSUPPORTED = re.compile(r"not implemented for|dtype|type .*\bshould be the same|BFloat16|Half", re.IGNORECASE)
# words of the names of sizes in config.json at which a model computes in another way, and the largest that is tried
BOUNDARIES, LARGEST = ("chunk", "block_size", "window"), 1024
# transformers' own code (without kernels) computes later chunks of these wrongly: 5.10, see benchmarks/hf_backend.py
WRONG_CHUNKS = {"nemotron_h", "zamba2"}


@torch.no_grad()
def check(model: "HFDecoder") -> None:
    """Compare what the assembled model computes with what transformers' own forward pass of it returns.

    Every rank calls it. Raise UserError for a tensor without a value, for buffers other than the constructor's, for a
    model that attends to later tokens, computes logits in another way than ptf or changes its weights while it computes
    (RWKV), and for an adapter without effect.
    """
    name = model.hf.config.model_type
    raise_if_without_values(model)
    device = next(model.parameters()).device
    _raise_if_wrong_chunks(model, device)
    part, whole = probe_lengths(model)
    tokens = _probe(model, whole).to(device)
    factor = model.scale

    def compare(x: Tensor, head: Head | Scalar) -> tuple[float, float, torch.dtype]:
        theirs, (model.scale, model.softcap) = _their_logits(model, tokens)
        x, head = (x / factor * model.scale, model.output()) if is_multimodal(model.hf.config) else (x, head)
        ended = model.body(input_ids=tokens[:, :part], use_cache=False)[0] * model.scale
        moved = (x[:, :part] - ended).abs().amax(-1)[0] / x.abs().max()  # [part]
        ours = head.values(x[:, -1]) if isinstance(head, Scalar) else head.logits(x)
        apart = (ours - theirs.view(ours.shape)).abs().max() / theirs.abs().max()
        # rounding to 16 bits may send some tokens to other experts
        most = moved.max() if head.weight.dtype == torch.float32 else moved.median()
        return float(most), float(apart), head.weight.dtype

    before = [_version(p) for p in model.parameters()]
    positions = torch.arange(tokens.shape[1], device=device)[None]
    try:
        with _calls(model) as (called, computed):
            moved, apart, dtype = model(tokens, positions, torch.zeros_like(positions), compare)
    except RuntimeError as error:
        if (mixed := _computed_in(model)) == torch.float32 or not UNSUPPORTED.search(str(error)):
            raise
        raise UserError(
            f"model.backend: hf: transformers cannot compute {name} in {str(mixed).removeprefix('torch.')} on this "
            f"{device.type} ({str(error).splitlines()[0]}); set train.precision: fp32"
        ) from error
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
    if kinds := uncalled_kinds(model, called):
        raise UserError(
            f"model.lora.targets: {', '.join(kinds)}: transformers' {name} computes with these weights directly, so an "
            "adapter beside them would have no effect; give targets without them"
        )
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
    _raise_if_idle_layers_train(model, [i for i in range(len(model.layers)) if i not in computed])


@contextlib.contextmanager
def _calls(model: "HFDecoder") -> Iterator[tuple[set[str], set[int]]]:
    """Record which modules with an adapter, by name, and which layers are called inside the `with` block."""
    called, computed = set[str](), set[int]()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: called.add(path))
        for path, module in model.hf.named_modules()
        if getattr(module, "adapters", None)
    ]
    hooks += [layer.register_forward_pre_hook(lambda *_, i=i: computed.add(i)) for i, layer in enumerate(model.layers)]
    try:
        yield called, computed
    finally:
        for hook in hooks:
            hook.remove()


def _computed_in(model: "HFDecoder") -> torch.dtype:
    policy = model._get_fsdp_state()._mp_policy if isinstance(model, FSDPModule) else None
    return (policy and policy.param_dtype) or next(model.parameters()).dtype


def _raise_if_wrong_chunks(model: "HFDecoder", device: torch.device) -> None:
    """Raise UserError for a model that transformers computes wrongly on this device."""
    has_kernels = getattr(sys.modules[type(model.hf).__module__], "is_fast_path_available", False)
    if model.text_config.model_type in WRONG_CHUNKS and not (device.type == "cuda" and has_kernels):
        raise UserError(
            f"model.backend: hf: without the kernels of mamba-ssm on a GPU, transformers computes "
            f"{model.hf.config.model_type} wrongly beyond one chunk: what it computes of a token depends on the tokens "
            "after it"
        )


def _raise_if_idle_layers_train(model: "HFDecoder", idle: Sequence[int]) -> None:
    """Raise UserError if one of the layers that take no part in a forward pass of text would be trained."""
    if any(p.requires_grad for i in idle for p in model.layers[i].parameters()):
        raise UserError(
            f"model.backend: hf: layers {', '.join(map(str, idle))} of {model.hf.config.model_type} take no part in "
            "what is computed of text, and weight decay alone would change them; name what trains in model.trainable "
            "(or model.lora.targets), without them"
        )


def raise_if_without_values(model: "HFDecoder") -> None:
    """Raise UserError for tensors on the meta device, and for buffers other than the model's constructor makes.

    Buffers that a checkpoint stores are as it stores them.
    """
    hf = model.hf
    with parameters_on_meta():
        buffers = type(hf)(hf.config).named_buffers(remove_duplicate=False)
        fresh = {name: b for name, b in buffers if name not in model.outside.buffers}
    mine, stored = dict(hf.named_buffers(remove_duplicate=False)), hf.state_dict().keys()
    wrong = [n for n, t in hf.named_parameters() if t.is_meta]
    wrong += sorted(
        n
        for n in mine.keys() | fresh.keys()
        if n not in mine
        or n not in fresh
        or mine[n].is_meta
        or (n not in stored and not torch.equal(mine[n].cpu(), fresh[n].to("cpu", mine[n].dtype)))
    )
    if wrong:
        raise UserError(
            f"model.backend: hf: {hf.config.model_type} was not assembled as transformers does it; these tensors have "
            f"other values: {', '.join(wrong)}"
        )


def _version(parameter: Tensor) -> int:
    """Return how often a parameter, or this rank's part of it, was changed in place."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter)._version


def probe_lengths(model: "HFDecoder") -> tuple[int, int]:
    """Return two lengths of sequences, the second longer, beyond the sizes at which the model computes otherwise."""
    sizes = {
        value
        for key, value in model.text_config.to_dict().items()
        if any(word in key for word in BOUNDARIES) and isinstance(value, int) and 1 < value <= LARGEST
    }
    size = max(sizes, default=32)
    most = min(model.config.max_positions, model.switches_at or 1 << 30)
    return min(size + PROBE // 2, most - 1), min(2 * size + PROBE, most)


def _probe(model: "HFDecoder", length: int) -> Tensor:
    """Return a sequence of tokens that two forward passes are compared with, [1, T], without padding tokens."""
    tokens, pad = model.text_tokens, getattr(model.text_config, "pad_token_id", None)
    tokens = tokens if pad is None else tokens[tokens != pad]
    return tokens[torch.randint(0, len(tokens), (1, length), generator=torch.Generator().manual_seed(0))]


def _their_logits(model: "HFDecoder", tokens: Tensor) -> tuple[Tensor, tuple[float, float | None]]:
    """Return transformers' logits of tokens, and the factor and soft-cap that they are made with."""
    with model.outside.put_back(), model.outside.filled_when_called(tokens.device):
        logits = model.hf(input_ids=tokens, use_cache=False).logits.float()
        if not is_multimodal(model.hf.config):
            return logits, (model.scale, model.softcap)
        return logits, applied_to_logits(model.hf, {1.0, model.scale}, {None, model.softcap})
