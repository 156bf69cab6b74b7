"""What a forward pass of the small model shows: where the norms are, and factors of embeddings and logits."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ptf.errors import UserError
from ptf.model.scaffold.reference import Reference

ATTENTION = re.compile(r"attn|attention")
MLP = re.compile(r"mlp|feed_forward|ffn|moe")
Calls = list[tuple[str, Tensor, Tensor]]


@dataclass(slots=True)
class Structure:
    """What was measured."""

    norms: dict[str, str] = field(default_factory=dict)  # norm of a layer → what ptf calls it
    children: frozenset[str] = frozenset()  # names of a layer's modules
    attention: str = ""  # name of the attention in a layer
    mlp: str = ""
    parallel: bool = False  # attention and MLP read the same
    norm_offset: bool = False
    rms: bool = True
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None  # as the attention says
    missed: list[str] = field(default_factory=list)  # what could not be measured


def measure(reference: Reference) -> Structure:
    """Run the small model once and return what it shows."""
    found, layer, model = Structure(), reference.layer(1), reference.model
    children = dict(layer.named_children())
    norms = [n for n, m in children.items() if "norm" in type(m).__name__.lower() or re.search(r"norm|^ln", n)]
    found.children = frozenset(children)
    found.attention = next((n for n in children if n not in norms and ATTENTION.search(n)), "")
    found.mlp = next((n for n in children if n not in norms and n != found.attention and MLP.search(n)), "")
    calls: Calls = []
    outer: dict[str, Any] = {}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    handles = [m.register_forward_hook(_recorder(calls, n), with_kwargs=True) for n, m in children.items()]
    handles += [
        embedding.register_forward_hook(lambda module, args, out: outer.update(embedded=module.weight[args[0]])),
        reference.layer(0).register_forward_pre_hook(
            lambda module, args, named: outer.update(first=args[0] if args else named.get("hidden_states")),
            with_kwargs=True,
        ),
        head.register_forward_hook(lambda module, args, out: outer.update(raw=out)),
    ]
    try:
        with torch.no_grad():
            tokens = torch.arange(1, 10)[None]
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # whatever transformers' forward pass raises
        raise UserError(f"{reference.model_type}: transformers cannot run its small model: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    _place(found, norms, calls)
    found.embed_scale = _factor(outer.get("first"), outer.get("embedded"), "embeddings", found)
    if not reference.settings.get("final_logit_softcapping"):
        found.logit_scale = _factor(logits, outer.get("raw"), "logits", found)
    weights = [w for n, m in children.items() if n in norms and isinstance(w := getattr(m, "weight", None), Tensor)]
    found.norm_offset = bool(weights) and not any(w.any() for w in weights)
    found.rms = not any(
        isinstance(children[n], nn.LayerNorm) or getattr(children[n], "bias", None) is not None for n in norms
    )
    found.attention_scale = next(
        (
            float(value)
            for name in ("scaling", "scale", "softmax_scale")
            if isinstance(value := getattr(children.get(found.attention), name, None), int | float)
        ),
        None,
    )
    return found


def _recorder(calls: Calls, name: str) -> Any:
    def record(module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
        given = args[0] if args else named.get("hidden_states")
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(given, Tensor) and isinstance(output, Tensor):
            calls.append((name, given, output))

    return record


def _place(found: Structure, norms: list[str], calls: Calls) -> None:
    """Name each norm by when it is called and by what it is given."""
    order = [name for name, _, _ in calls]
    if found.attention not in order or found.mlp not in order:
        found.missed.append("which of a layer's modules are its attention and its MLP")
        return
    attention, mlp = order.index(found.attention), order.index(found.mlp)
    found.parallel = mlp < attention or torch.equal(calls[attention][1], calls[mlp][1])
    for at, (name, given, _) in enumerate(calls):
        if name not in norms:
            continue
        if at < attention:
            place = "attn_norm"
        elif torch.equal(given, calls[attention][2]):
            place = "attn_post_norm"
        elif at < mlp:
            place = "mlp_norm"
        else:
            place = "mlp_post_norm"
        if place not in found.norms.values():
            found.norms[name] = place


def _factor(result: Any, given: Any, what: str, found: Structure) -> float:
    """Return the number by which a tensor was multiplied; 1 where it was not only that."""
    if not isinstance(result, Tensor) or not isinstance(given, Tensor) or result.shape != given.shape:
        found.missed.append(f"a factor of the {what}")
        return 1.0
    if torch.allclose(result, given, rtol=1e-5):
        return 1.0
    ratio = float((result * given).sum() / (given * given).sum())
    if not torch.allclose(result, ratio * given, rtol=1e-3, atol=1e-5):
        found.missed.append(f"what happens to the {what} (more than a factor)")
        return 1.0
    return ratio
