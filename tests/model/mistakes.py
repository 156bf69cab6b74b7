"""Porting mistakes, each of which the logit verifier must catch: a wrong config mapping, wrong names,
or a wrong computation."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ptf.model import decoder, gated_delta, moe, rope
from ptf.model.checkpoint_mapping import Concatenate, Interleave, TensorMapping
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, Family
from ptf.model.kernels import attention, delta_rule, elementwise


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    model_type: str
    family: Callable[[Family], Family] | None = None
    model: Callable[[Decoder], Any] | None = None
    patch: tuple[Any, str, Any] | None = None  # object, attribute, wrong value

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        families = importlib.import_module(f"ptf.model.families.{MODULES[self.model_type]}").FAMILIES
        right = families[self.model_type]
        kept = getattr(self.patch[0], self.patch[1]) if self.patch else None
        try:
            if self.family:
                families[self.model_type] = self.family(right)
            if self.patch:
                setattr(*self.patch)
            yield
        finally:
            families[self.model_type] = right
            if self.patch:
                setattr(self.patch[0], self.patch[1], kept)


def mapped(change: Callable[[DecoderConfig], DecoderConfig]) -> Callable[[Family], Family]:
    """Apply `change` to the result of the family's config mapping."""
    return lambda family: replace(family, decoder=lambda c: change(family.decoder(c)))


def fields(**values: Any) -> Callable[[Family], Family]:
    return mapped(lambda c: replace(c, **values))


def layers(change: Callable[[int, Layer], Layer]) -> Callable[[Family], Family]:
    return mapped(lambda c: replace(c, layers=tuple(change(i, kind) for i, kind in enumerate(c.layers))))


def ropes(change: Callable[[Rope], Rope]) -> Callable[[Family], Family]:
    return layers(lambda i, kind: replace(kind, rope=change(kind.rope)))


def experts(**values: Any) -> Callable[[Family], Family]:
    return mapped(lambda c: replace(c, moe=replace(c.moe, **values)))


def swapped(one: str, other: str) -> Callable[[Family], Family]:
    """Swap two of ptf's parameter names."""

    def swap(mapping: TensorMapping) -> TensorMapping:
        name, *more = mapping.ours
        if more or not (one in name or other in name):
            return mapping
        return replace(mapping, ours=(name.replace(one, other) if one in name else name.replace(other, one),))

    return lambda family: replace(family, mappings=tuple(swap(mapping) for mapping in family.mappings))


def each(part: str, change: Callable[[nn.Module], Any]) -> Callable[[Decoder], None]:
    """Change a part of every layer that has it, without gradient."""

    def apply(model: Decoder) -> None:
        with torch.no_grad():
            for layer in model.layers:
                module = layer.get_submodule(part) if any(n == part for n, _ in layer.named_modules()) else None
                if module is not None:
                    change(module)

    return apply


def rows(order: Callable[[torch.Tensor, int], torch.Tensor], *names: str) -> Callable[[Decoder], None]:
    """Reorder the rows of projections of attention."""

    def change(attention: nn.Module) -> None:
        for name in names:
            projection = getattr(attention, name)
            projection.weight.copy_(order(projection.weight.clone(), attention.head_dim))
            if projection.bias is not None:
                projection.bias.copy_(order(projection.bias.clone(), attention.head_dim))

    return each("attn", change)


def _pairs(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Lay out the rotary dimensions in pairs, instead of halves."""
    return weight.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _tiled(attention: nn.Module) -> None:
    """Assign query heads to key heads in turn, instead of in groups."""
    size = attention.head_dim
    groups = attention.k_proj.weight.shape[0] // size
    order = torch.arange(attention.q_proj.weight.shape[0] // size).view(groups, -1).t().flatten()
    for p in (attention.q_proj.weight, attention.q_proj.bias):
        if p is not None:
            p.copy_(p.clone().unflatten(0, (-1, size))[order].flatten(0, 1))
    out = attention.o_proj.weight
    out.copy_(out.clone().unflatten(1, (-1, size))[:, order].flatten(1))


def _norm_last(attention: nn.Module) -> None:
    """Normalise queries and keys after the rotation, instead of before."""

    def forward(x: torch.Tensor, table: Any, attend: Any) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, attention.head_dim)) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = attention.q_norm(rope.rotate(q, table)), attention.k_norm(rope.rotate(k, table))
        return attention.o_proj(attend(attention, q, k, v).flatten(-2))

    attention.forward = forward


def _halves(mapping: Interleave, which: int, part: Any, read: Any) -> torch.Tensor:
    """Read gate and up as the two halves of the tensor, instead of alternating rows."""
    both = read(mapping.other, tuple(slice(0, 10**6) for _ in part))
    one = both.chunk(2, -1)[which]
    return (one.transpose(-2, -1) if mapping.transposed else one)[part]


def _zero(name: str) -> Callable[[nn.Module], None]:
    return lambda module: getattr(module, name).zero_()


def _set(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


def _shift_window(by: int) -> Callable[[Family], Family]:
    return layers(lambda i, kind: replace(kind, window=kind.window and kind.window + by))


def _identity_norms(attention: nn.Module) -> None:
    attention.q_norm = attention.k_norm = nn.Identity()


def _transposed(experts_: nn.Module) -> None:
    """The first expert's down projection read with its dimensions swapped."""
    down = experts_.down_proj
    down[0].copy_(down[0].clone().flatten().view(down.shape[2], -1).t())


def _one_rope(c: DecoderConfig) -> DecoderConfig:
    return replace(c, layers=tuple(replace(kind, rope=c.layers[0].rope) for kind in c.layers))


def _windows_moved(c: DecoderConfig) -> DecoderConfig:
    return replace(c, layers=tuple(replace(kind, window=c.layers[i - 1].window) for i, kind in enumerate(c.layers)))


def _latent(**values: Any) -> Callable[[Family], Family]:
    return mapped(lambda c: replace(c, latent=c.latent and replace(c.latent, **values)))


def _pairs_for_halves(c: DecoderConfig) -> DecoderConfig:
    assert c.latent
    return replace(c, latent=replace(c.latent, interleaved=not c.latent.interleaved))


def _weights_with_correction(mixture: Any) -> None:
    """Take the weights of the chosen experts from the scores with the bias that is meant for the choice."""
    choice = mixture._sigmoid_choice

    def wrong(x: torch.Tensor) -> Any:
        probability, _, chosen = choice(x)
        bias = mixture.correction_bias.view(torch.float32)
        share = (moe.wide_projection(mixture.router, x).sigmoid() + bias).gather(-1, chosen)
        if mixture.config.normalise:
            share = share / share.sum(-1, keepdim=True)
        return probability, share * mixture.config.scaling, chosen

    mixture._sigmoid_choice = wrong


def _keys_for_values(attention: Any) -> None:
    """Read the values of each head before its keys."""
    weight = attention.kv_b_proj.weight
    heads = weight.clone().unflatten(0, (-1, attention.head_dim - attention.rotated + attention.value_dim))
    weight.copy_(heads.roll(attention.value_dim, 1).flatten(0, 1))


def _reordered(order: Callable[[tuple[str, ...]], tuple[str, ...]], part: str) -> Callable[[Family], Family]:
    """Concatenate projections in another order."""

    def change(mapping: TensorMapping) -> TensorMapping:
        if isinstance(mapping, Concatenate) and part in mapping.other:
            return replace(mapping, ours=order(mapping.ours))
        return mapping

    return lambda family: replace(family, mappings=tuple(change(mapping) for mapping in family.mappings))


def _norm_of_heads(attention_: nn.Module) -> None:
    """Normalise each head's queries by themselves."""
    norm, size = attention_.q_width_norm, attention_.head_dim
    norm.forward = lambda x: (
        norm.weight * nn.functional.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=norm.eps).flatten(-2)
    )


def _no_width_norm(attention_: nn.Module) -> None:
    attention_.k_width_norm = nn.Identity()


def _norms_before(block: Any, x: torch.Tensor, rope: Any, attend: Any, real: torch.Tensor) -> torch.Tensor:
    """Apply the norms before attention and MLP, instead of after them."""
    x = x + block.attn(block.attn_post_norm(x), rope, attend)
    return x + block.mlp(block.mlp_post_norm(x))


def _scaled_as_the_whole_layers(c: DecoderConfig) -> DecoderConfig:
    """The rotary frequencies of the layers without a window in all layers."""
    whole = next((kind.rope for kind in c.layers if kind.window is None), c.layers[0].rope)
    return replace(c, layers=tuple(replace(kind, rope=whole) for kind in c.layers))


def _positions_moved(c: DecoderConfig) -> DecoderConfig:
    """Layers without positions one layer later."""
    return replace(c, layers=tuple(replace(kind, rope=c.layers[i - 1].rope) for i, kind in enumerate(c.layers)))


def _whole_without_positions(i: int, kind: Layer) -> Layer:
    """Every layer without a window is one without positions."""
    return kind if kind.window else replace(kind, rope=replace(kind.rope, partial=0.0))


def _frequencies_of_the_head(positions: torch.Tensor, dim: int, of: Rope) -> Any:
    """The frequencies of the whole head, of which the first ones are taken."""
    cos, sin = rope.rotary(positions, dim, replace(of, partial=1.0))
    part = int(dim * of.partial) // 2
    return torch.cat((cos[..., :part], cos[..., :part]), -1), torch.cat((sin[..., :part], -sin[..., :part]), -1)


def _growth_one_early(positions: torch.Tensor, dim: int, of: Rope) -> Any:
    """Queries grow at the last position before the length of pre-training."""
    cos, sin, *_ = rope.rotary(positions, dim, of)
    return cos, sin, rope.rotary(positions + 1, dim, of)[-1]


def _balance_of_layers(routings: list[moe.Routing]) -> torch.Tensor:
    """The mean of the layers' load-balancing losses, instead of that of all layers together."""
    return torch.stack([moe.load_balancing_loss([routing]) for routing in routings]).mean()


def _balance_without_gradient(routings: list[moe.Routing]) -> torch.Tensor:
    return moe.load_balancing_loss(routings).detach()


def _caps_swapped(c: DecoderConfig) -> DecoderConfig:
    return replace(c, attention_softcap=c.softcap, softcap=c.attention_softcap)


def _one_document(segments: torch.Tensor, size: int) -> delta_rule.Chunks:
    """Chunks of a packed batch as of one document: the state is not reset."""
    return _CHUNKS(torch.where(segments >= 0, 0, segments), size)


def _never_reset(x: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A convolution that reads across the beginnings of documents."""
    return delta_rule.convolve(x, torch.arange(x.shape[1]).expand_as(positions), weight)


def _gate_before_query(attention_: Any) -> None:
    """Read each head's gate before its query."""
    if getattr(attention_, "gated", False):
        weight = attention_.q_proj.weight
        weight.copy_(weight.clone().unflatten(0, (-1, 2, attention_.head_dim)).flip(1).flatten(0, 2))


def _one_gate(attention_: Any) -> None:
    """Halve the output of attention, whatever its input."""
    if getattr(attention_, "gated", False):
        attention_.q_proj.weight.unflatten(0, (-1, 2, attention_.head_dim))[:, 1].zero_()


def _ungrouped(layer: Any, x: torch.Tensor) -> Any:
    """Read queries, keys, values and gate as one after the other, instead of grouped by key head."""
    c = layer.config
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    qkv, z = layer.qkvz_proj(x).split((2 * keys + values, values), -1)
    return qkv, z, *layer.ba_proj(x).chunk(2, -1)


def _heads_in_turn(layer: Any, qkv: torch.Tensor) -> Any:
    """Give the heads of values to the heads of keys in turn, instead of in groups."""
    q, k, v = _HEADS(layer, qkv)
    c = layer.config
    order = torch.arange(c.value_heads).view(c.key_heads, -1).t().flatten()
    return q[..., order, :], k[..., order, :], v


_CHUNKS, _HEADS = delta_rule.Chunks.of, gated_delta.GatedDeltaNet.heads
HYBRIDS = ("qwen3_5_text", "qwen3_next")


def _of_linear_attention(model_type: str) -> tuple[Mistake, ...]:
    return (
        Mistake("state not reset", model_type, patch=(delta_rule.Chunks, "of", staticmethod(_one_document))),
        Mistake("convolution not reset", model_type, patch=(attention, "convolve", _never_reset)),
        Mistake(
            "heads of values given in turn", model_type, patch=(gated_delta.GatedDeltaNet, "heads", _heads_in_turn)
        ),
        Mistake("gate read before query", model_type, model=each("attn", _gate_before_query)),
        Mistake("one gate for all", model_type, model=each("attn", _one_gate)),
        Mistake("heads rotated whole", model_type, ropes(lambda r: replace(r, partial=1.0))),
        Mistake(
            "norm of linear attention offset by one", model_type, model=each("attn.norm", lambda m: m.weight.add_(1))
        ),
        Mistake(
            "time step's bias left out",
            model_type,
            model=each("attn", lambda m: getattr(m, "dt_bias", torch.ones(1)).zero_()),
        ),
        Mistake("no decay", model_type, model=each("attn", lambda m: getattr(m, "a_log", torch.ones(1)).fill_(-99))),
        Mistake(
            "kinds of layers one too early",
            model_type,
            mapped(lambda c: replace(c, layers=(*c.layers[1:], c.layers[0]))),
        ),
    )


MISTAKES = (
    *(mistake for model_type in HYBRIDS for mistake in _of_linear_attention(model_type)),
    Mistake("shared expert not gated", "qwen3_next", model=each("moe", _set("shared_gate", None))),
    Mistake("experts always normalised", "qwen3_next", experts(normalise=True)),
    Mistake("rows not grouped by key head", "qwen3_next", patch=(gated_delta.GatedDeltaNet, "_grouped", _ungrouped)),
    Mistake("vision tensors not known", "qwen3_5", lambda family: replace(family, carried=())),
    Mistake("shared expert left out", "qwen3_5_moe", model=each("moe.shared.down_proj", _zero("weight"))),
    Mistake("gate and up of experts swapped", "qwen3_5_moe_text", swapped("experts.gate_proj", "experts.up_proj")),
    Mistake("rope base 1 % off", "llama", ropes(lambda r: replace(r, theta=r.theta * 1.01))),
    Mistake("rope scaling ignored", "llama", ropes(lambda r: Rope(r.theta))),
    Mistake("rope scaling by half the factor", "llama", ropes(lambda r: replace(r, factor=max(1.0, r.factor / 2)))),
    Mistake(
        "Llama 3 scaling with the ends swapped",
        "llama",
        ropes(lambda r: replace(r, high=r.high * 2) if r.kind == "llama3" else r),
    ),
    Mistake("YaRN without its attention factor", "llama", ropes(lambda r: replace(r, scale=1.0))),
    Mistake("low_freq_factor ignored", "llama", ropes(lambda r: replace(r, low=1.0) if r.kind == "llama3" else r)),
    Mistake("beta_slow ignored", "llama", ropes(lambda r: replace(r, low=1.0) if r.kind == "yarn" else r)),
    Mistake(
        "YaRN with beta_fast and beta_slow swapped",
        "llama",
        ropes(lambda r: replace(r, low=r.high, high=r.low) if r.kind == "yarn" else r),
    ),
    Mistake("norm epsilon ten times too large", "llama", mapped(lambda c: replace(c, norm_eps=c.norm_eps * 10))),
    Mistake("tied head taken for untied", "llama", mapped(lambda c: replace(c, tied=not c.tied))),
    Mistake("attention biases left out", "llama", fields(qkv_bias=False, out_bias=False)),
    Mistake("MLP biases left out", "llama", fields(mlp_bias=False)),
    Mistake("gate and up swapped", "llama", swapped("gate_proj", "up_proj")),
    Mistake("queries and keys swapped", "llama", swapped("q_proj", "k_proj")),
    Mistake("norms of a block swapped", "llama", swapped("attn_norm", "mlp_norm")),
    Mistake("rotary dimensions in pairs", "llama", model=rows(_pairs, "q_proj", "k_proj")),
    Mistake("key heads dealt in turn", "llama", model=each("attn", _tiled)),
    Mistake("attention scaled by the head size", "llama", mapped(lambda c: replace(c, attention_scale=1 / c.head_dim))),
    Mistake("final norm not scaled", "llama", model=lambda m: m.norm.weight.data.fill_(1)),
    Mistake("GELU for SiLU", "llama", fields(activation="gelu_tanh")),
    Mistake("window one short", "mistral", _shift_window(-1)),
    Mistake("window one long", "mistral", _shift_window(1)),
    Mistake("window ignored", "mistral", layers(lambda i, kind: replace(kind, window=None))),
    Mistake("biases of queries, keys and values left out", "qwen2", fields(qkv_bias=False)),
    Mistake("value bias zero", "qwen2", model=each("attn.v_proj", _zero("bias"))),
    Mistake("window from one layer later", "qwen2", mapped(lambda c: replace(c, layers=(c.layers[0], *c.layers[:-1])))),
    Mistake("no norm of queries and keys", "qwen3", model=each("attn", _identity_norms)),
    Mistake("queries and keys normalised after the rotation", "qwen3", model=each("attn", _norm_last)),
    Mistake("norms of queries and keys swapped", "qwen3", swapped("q_norm", "k_norm")),
    Mistake("head size from the width", "qwen3", mapped(lambda c: replace(c, head_dim=c.dim // c.heads))),
    Mistake("chosen experts not normalised", "qwen3_moe", experts(normalise=False)),
    Mistake("chosen experts always normalised", "qwen3_moe", experts(normalise=True)),
    Mistake(
        "one expert too few",
        "qwen3_moe",
        mapped(lambda c: replace(c, moe=replace(c.moe, top_k=max(1, c.moe.top_k - 1)))),
    ),
    Mistake("expert gates and ups swapped", "qwen3_moe", swapped("experts.gate_proj", "experts.up_proj")),
    Mistake(
        "experts in reverse order", "qwen3_moe", model=each("moe.router", lambda r: r.weight.copy_(r.weight.flip(0)))
    ),
    Mistake("an expert transposed", "qwen3_moe", model=each("moe.experts", _transposed)),
    Mistake("experts in every layer", "qwen3_moe", layers(lambda i, kind: replace(kind, moe=True))),
    Mistake("shared expert left out", "qwen2_moe", model=each("moe.shared.down_proj", _zero("weight"))),
    Mistake("shared expert not gated", "qwen2_moe", model=each("moe", _set("shared_gate", None))),
    Mistake("shared expert's gate and up swapped", "qwen2_moe", swapped("shared.gate_proj", "shared.up_proj")),
    Mistake("chosen experts always normalised", "qwen2_moe", experts(normalise=True)),
    Mistake("windows in the wrong half of the layers", "qwen2_moe", mapped(_windows_moved)),
    Mistake("whole heads rotated", "glm4_moe", ropes(lambda r: replace(r, partial=1.0))),
    Mistake(
        "half of each head rotated, whatever the config says", "glm4_moe", ropes(lambda r: replace(r, partial=0.5))
    ),
    Mistake("no norm of queries and keys", "glm4_moe", model=each("attn", _identity_norms)),
    Mistake("biases of queries, keys and values left out", "glm4_moe", fields(qkv_bias=False)),
    Mistake("experts scored by a softmax", "glm4_moe", experts(scores="softmax")),
    Mistake("first layers not dense", "glm4_moe", layers(lambda i, kind: replace(kind, moe=True))),
    Mistake("shared expert left out", "glm4_moe", model=each("moe.shared.down_proj", _zero("weight"))),
    Mistake("rotated dimensions in halves for pairs", "deepseek_v3", mapped(_pairs_for_halves)),
    Mistake("YaRN's mscale left out of the softmax", "deepseek_v3", fields(attention_scale=None)),
    Mistake("correction bias ignored", "deepseek_v3", model=each("moe", _set("correction_bias", None))),
    Mistake("correction bias in the weights", "deepseek_v3", model=each("moe", _weights_with_correction)),
    Mistake("correction bias not known", "deepseek_v3", experts(correction=False)),
    Mistake("experts of all groups", "deepseek_v3", experts(groups=1)),
    Mistake("experts of one group", "deepseek_v3", experts(top_groups=1)),
    Mistake("chosen experts always normalised", "deepseek_v3", experts(normalise=True)),
    Mistake("weights of the experts not scaled", "deepseek_v3", experts(scaling=1.0)),
    Mistake("shared expert left out", "deepseek_v3", model=each("moe.shared.down_proj", _zero("weight"))),
    Mistake("values before keys", "deepseek_v3", model=each("attn", _keys_for_values)),
    Mistake("no norm of the narrow keys", "deepseek_v3", model=each("attn", _set("kv_a_norm", nn.Identity()))),
    Mistake("queries always narrow", "deepseek_v3", _latent(query_rank=16)),
    Mistake(
        "one layer dense, whatever the config says",
        "glm4_moe_lite",
        layers(lambda i, kind: replace(kind, moe=i > 0)),
    ),
    Mistake("weights of the experts not scaled", "glm4_moe_lite", experts(scaling=1.0)),
    Mistake("rotated dimensions in halves for pairs", "glm4_moe_lite", mapped(_pairs_for_halves)),
    Mistake("correction bias in the weights", "glm4_moe_lite", model=each("moe", _weights_with_correction)),
    Mistake(
        "the balance loss is a mean over layers",
        "qwen3_moe",
        patch=(decoder, "load_balancing_loss", _balance_of_layers),
    ),
    Mistake(
        "the balance loss has no gradient",
        "qwen3_moe",
        patch=(decoder, "load_balancing_loss", _balance_without_gradient),
    ),
    Mistake("the balance loss has no weight", "qwen3_moe", experts(router_aux_loss_coef=0.0)),
    Mistake("norms not offset by one", "gemma3_text", fields(norm_offset=False)),
    Mistake("embeddings not scaled", "gemma3_text", fields(embed_scale=1.0)),
    Mistake("attention scaled by the head size, not the config's scalar", "gemma3_text", fields(attention_scale=None)),
    Mistake("SiLU for GELU", "gemma3_text", fields(activation="silu")),
    Mistake("no norm after attention and MLP", "gemma3_text", fields(post_norm=False)),
    Mistake(
        "norm after attention taken for the one before the MLP", "gemma3_text", swapped("attn_post_norm", "mlp_norm")
    ),
    Mistake("one rotary base for all layers", "gemma3_text", mapped(_one_rope)),
    Mistake(
        "global layers one too early", "gemma3_text", mapped(lambda c: replace(c, layers=(*c.layers[1:], c.layers[0])))
    ),
    Mistake("logits not soft-capped", "gemma3_text", fields(softcap=None)),
    Mistake("window one long", "gemma3_text", _shift_window(1)),
    Mistake("vision tensors not known", "gemma3", lambda family: replace(family, carried=())),
    Mistake("sinks left out", "gpt_oss", model=each("attn", _set("sinks", None))),
    Mistake("sinks of the other heads", "gpt_oss", model=each("attn", lambda a: a.sinks.copy_(a.sinks.flip(0)))),
    Mistake("windows in the wrong half of the layers", "gpt_oss", mapped(_windows_moved)),
    Mistake("gate and up not clamped", "gpt_oss", experts(clamp=1e9)),
    Mistake("clamped at 6", "gpt_oss", experts(clamp=6.0)),
    Mistake("plain sigmoid in the gate", "gpt_oss", patch=(elementwise, "SWISH", 1.0)),
    Mistake("gate and up as halves", "gpt_oss", patch=(Interleave, "read", _halves)),
    Mistake("router bias left out", "gpt_oss", model=each("moe.router", _zero("bias"))),
    Mistake("expert biases of the up projection left out", "gpt_oss", model=each("moe.experts", _zero("up_bias"))),
    Mistake(
        "YaRN truncates where the config says not to", "gpt_oss", ropes(lambda r: replace(r, truncate=not r.truncate))
    ),
    Mistake("no weight of the balance loss", "gpt_oss", experts(router_aux_loss_coef=0.001)),
    Mistake("norms before attention and MLP", "olmo2", patch=(decoder.Block, "forward", _norms_before)),
    Mistake("norms before and after", "olmo2", fields(pre_norm=True)),
    Mistake("queries normalised head by head", "olmo2", model=each("attn", _norm_of_heads)),
    Mistake("keys not normalised", "olmo2", model=each("attn", _no_width_norm)),
    Mistake("norms after attention and MLP swapped", "olmo2", swapped("attn_post_norm", "mlp_post_norm")),
    Mistake("norm epsilon ten times too large", "olmo2", mapped(lambda c: replace(c, norm_eps=c.norm_eps * 10))),
    Mistake("frequencies scaled in the layers with a window", "olmo3", mapped(_scaled_as_the_whole_layers)),
    Mistake("frequencies scaled nowhere", "olmo3", ropes(lambda r: Rope(r.theta))),
    Mistake("window one long", "olmo3", _shift_window(1)),
    Mistake("windows one layer later", "olmo3", mapped(_windows_moved)),
    Mistake("keys not normalised", "olmo3", model=each("attn", _no_width_norm)),
    Mistake("positions in every layer", "smollm3", ropes(lambda r: replace(r, partial=1.0))),
    Mistake("no positions where there are some", "smollm3", ropes(lambda r: replace(r, partial=1.0 - r.partial))),
    Mistake("layers without positions one later", "smollm3", mapped(_positions_moved)),
    Mistake("window ignored", "smollm3", layers(lambda i, kind: replace(kind, window=None))),
    Mistake("MLP biases left out", "smollm3", fields(mlp_bias=False)),
    Mistake("residual factor left out", "granite", fields(residual_scale=1.0)),
    Mistake("embedding factor left out", "granite", fields(embed_scale=1.0)),
    Mistake("attention scaled by the head size", "granite", fields(attention_scale=None)),
    Mistake(
        "logits multiplied instead of divided", "granite", mapped(lambda c: replace(c, logit_scale=1 / c.logit_scale))
    ),
    Mistake("logits not scaled", "granite", fields(logit_scale=1.0)),
    Mistake("residual factor after attention only", "granite", model=each("mlp.down_proj", lambda p: p.weight.mul_(2))),
    Mistake("keys before queries", "phi3", _reordered(lambda n: (n[1], n[0], n[2]), "qkv_proj")),
    Mistake("values before keys", "phi3", _reordered(lambda n: (n[0], n[2], n[1]), "qkv_proj")),
    Mistake("ups before gates", "phi3", _reordered(lambda n: n[::-1], "gate_up_proj")),
    Mistake("the whole head rotated", "phi3", ropes(lambda r: replace(r, partial=1.0))),
    Mistake("frequencies of the whole head", "phi3", patch=(decoder, "rotary", _frequencies_of_the_head)),
    Mistake("window ignored", "phi3", layers(lambda i, kind: replace(kind, window=None))),
    Mistake("biases of queries, keys and values left out", "seed_oss", fields(qkv_bias=False)),
    Mistake("output bias left out", "seed_oss", fields(out_bias=False)),
    Mistake("output bias as the others", "seed_oss", mapped(lambda c: replace(c, out_bias=c.qkv_bias))),
    Mistake("MLP biases left out", "seed_oss", fields(mlp_bias=False)),
    Mistake("head size from the width", "seed_oss", mapped(lambda c: replace(c, head_dim=c.dim // c.heads))),
    Mistake("queries do not grow", "ministral3", ropes(lambda r: replace(r, query_growth=0.0))),
    Mistake("queries grow a position early", "ministral3", patch=(decoder, "rotary", _growth_one_early)),
    Mistake("queries grow half as fast", "ministral3", ropes(lambda r: replace(r, query_growth=r.query_growth / 2))),
    Mistake("YaRN's attention factor without mscale", "ministral3", ropes(lambda r: replace(r, scale=1.0))),
    Mistake("window ignored", "ministral3", layers(lambda i, kind: replace(kind, window=None))),
    Mistake("vision tensors not known", "mistral3", lambda family: replace(family, carried=())),
    Mistake("the text model of Mistral always", "mistral3", ropes(lambda r: replace(r, query_growth=0.0))),
    Mistake("tied head taken for untied", "mistral3", mapped(lambda c: replace(c, tied=not c.tied))),
    Mistake("window ignored", "mistral3", layers(lambda i, kind: replace(kind, window=None))),
    Mistake("positions in every layer", "exaone4", ropes(lambda r: replace(r, partial=1.0))),
    Mistake("no positions in whole layers, though no layer has a window", "exaone4", layers(_whole_without_positions)),
    Mistake("layers without positions one later", "exaone4", mapped(_positions_moved)),
    Mistake("windows one layer later", "exaone4", mapped(_windows_moved)),
    Mistake("window one short", "exaone4", _shift_window(-1)),
    Mistake("window ignored", "exaone4", layers(lambda i, kind: replace(kind, window=None))),
    Mistake("norms before attention and MLP", "exaone4", patch=(decoder.Block, "forward", _norms_before)),
    Mistake("norms of a block swapped", "exaone4", swapped("attn_post_norm", "mlp_post_norm")),
    Mistake("no norm of queries and keys", "exaone4", model=each("attn", _identity_norms)),
    Mistake("queries and keys normalised after the rotation", "exaone4", model=each("attn", _norm_last)),
    Mistake("norms of queries and keys swapped", "exaone4", swapped("q_norm", "k_norm")),
    Mistake("head size from the width", "exaone4", mapped(lambda c: replace(c, head_dim=c.dim // c.heads))),
    Mistake("attention not soft-capped", "gemma2", fields(attention_softcap=None)),
    Mistake("logits not soft-capped", "gemma2", fields(softcap=None)),
    Mistake("soft-caps of attention and logits swapped", "gemma2", mapped(_caps_swapped)),
    Mistake("windows one layer later", "gemma2", mapped(_windows_moved)),
    Mistake("attention scaled by the head size", "gemma2", fields(attention_scale=None)),
    Mistake("norms not offset by one", "gemma2", fields(norm_offset=False)),
    Mistake("embeddings not scaled", "gemma2", fields(embed_scale=1.0)),
)


_held: list[Decoder] = []


def _angles_in_the_models_dtype(positions: torch.Tensor, dim: int, of: Rope) -> Any:
    """Round the products of positions and frequencies to the model's dtype, and not their cosines and sines."""
    angles = positions[..., None].float() * rope.frequencies(of, int(dim * of.partial))
    angles = angles.to(_held[-1].embed.weight.dtype).float()[:, :, None]
    return torch.cat((angles, angles), -1).cos() * of.scale, torch.cat((-angles, angles), -1).sin() * of.scale


def _frequencies_in_the_models_dtype(of: Rope, dim: int, device: torch.device | None = None) -> torch.Tensor:
    return _FREQUENCIES(of, dim, device).to(_held[-1].embed.weight.dtype).float()


_FREQUENCIES = rope.frequencies

# Seen in bf16 alone, so not by the random members of a family, which are compared in fp32.
CASTS = tuple(
    Mistake(name, "llama", model=lambda model: _held.__setitem__(slice(None), [model]), patch=patch)
    for name, patch in (
        ("angles cast before their cosines", (decoder, "rotary", _angles_in_the_models_dtype)),
        ("frequencies cast", (rope, "frequencies", _frequencies_in_the_models_dtype)),
    )
)
