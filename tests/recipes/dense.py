"""What the recipes' losses are compared with: transformers in float64, one document at a time,
and the papers' equations written out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ptf.data.document import Document
from ptf.model.lora import adapters


def model(directory: Path, scalar: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")


def answer(network: Any, sample: Document) -> tuple[Tensor, int]:
    """Return the summed log-prob of the trained tokens, and their number."""
    tokens = torch.tensor(sample.tokens[None].astype("int64"))
    logprobs = network(tokens).logits[0, :-1].log_softmax(-1)
    picked = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
    trained = torch.tensor(sample.loss_weights[1:] != 0)
    return picked[trained].sum(), int(trained.sum())


def score(network: Any, sample: Document) -> Tensor:
    return network(torch.tensor(sample.tokens[None].astype("int64"))).logits[0, 0]


NAMES = {
    "model.embed_tokens.": "embed.",
    "model.norm.": "norm.",
    "model.layers.": "layers.",
    ".self_attn.": ".attn.",
    "lm_head.": "head.",
    "score.": "head.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
}


def unified(name: str) -> str:
    """Return ptf's name of a parameter of transformers' model."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def gradients(network: Any) -> dict[str, Tensor]:
    """Return the gradients by ptf's names."""
    return {unified(name): parameter.grad for name, parameter in network.named_parameters()}


def adapted(network: Any, ours: Any) -> tuple[Callable[[Tensor], Any], dict[str, Tensor]]:
    """The network, with the adapters of our model in its weights: W + s · B A; and what trains,
    under ptf's names: they, and a scalar head."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in ours.named_parameters() if p.requires_grad}
    weights, pairs = {}, adapters(ours)
    for name, parameter in network.named_parameters():
        weights[name] = leaves.get(unified(name), parameter.detach())
        if adapter := pairs.get(unified(name)):
            weights[name] = weights[name] + adapter.scale * leaves[adapter.b] @ leaves[adapter.a]
    return lambda tokens: functional_call(network, weights, (tokens,)), leaves


def beside(directory: Path, ours: Any, scalar: bool = False) -> tuple[Any, Callable[[], dict[str, Tensor]]]:
    """The model of a directory with our model's adapters, if it has any; and its gradients, once there are some."""
    network = model(directory, scalar)
    if not adapters(ours):
        return network, lambda: gradients(network)
    theirs, leaves = adapted(network, ours)
    return theirs, lambda: {name: leaf.grad for name, leaf in leaves.items()}


def apart(ours: Any, theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of any gradient, relative to the largest gradient of that tensor."""
    found = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in ours.named_parameters()
        if p.grad is not None
    }
    assert found.keys() == theirs.keys()
    cut = {n: found[n][: len(theirs[n])] for n in theirs}  # ptf fills the vocabulary up
    return max(float((cut[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in cut)
