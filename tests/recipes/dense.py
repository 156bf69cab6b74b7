"""What the recipes' losses are compared with: transformers in float64, one document at a time, and the papers' equations written out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptf.data.sample import Sample


def model(directory: Path, scalar: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")


def answer(network: Any, sample: Sample) -> tuple[Tensor, int]:
    """Log-prob of the trained tokens, and how many they are."""
    tokens = torch.tensor(sample.tokens[None].astype("int64"))
    logprobs = network(tokens).logits[0, :-1].log_softmax(-1)
    picked = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
    trained = torch.tensor(sample.weights[1:] != 0)
    return picked[trained].sum(), int(trained.sum())


def score(network: Any, sample: Sample) -> Tensor:
    return network(torch.tensor(sample.tokens[None].astype("int64"))).logits[0, 0]


def gradients(network: Any) -> dict[str, Tensor]:
    """Under ptf's names."""
    names = {
        "model.embed_tokens.": "embed.", "model.norm.": "norm.", "model.layers.": "layers.", ".self_attn.": ".attn.", "lm_head.": "head.", "score.": "head.",
        ".input_layernorm.": ".attn_norm.", ".post_attention_layernorm.": ".mlp_norm.",
    }  # fmt: skip
    found = {}
    for name, parameter in network.named_parameters():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = parameter.grad
    return found


def apart(ours: Any, theirs: dict[str, Tensor]) -> float:
    """Largest difference of any gradient, relative to the largest gradient of that tensor."""
    found = dict(ours.named_parameters())
    assert found.keys() == theirs.keys()
    cut = {n: found[n].grad[: len(theirs[n])] for n in theirs}  # ptf fills the vocabulary up
    return max(float((cut[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in cut)
