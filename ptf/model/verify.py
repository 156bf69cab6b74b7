"""Comparison with transformers, the reference: of an exported directory with the run that trained it."""

from collections.abc import Sequence
from pathlib import Path

import torch


@torch.no_grad()
def export_difference(directory: Path, tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    """Largest |log-prob(transformers, loaded from `directory`) − log-prob(the trained model)| over a probe of n tokens, n − 1 log-probs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([list(tokens)])
    logits = model(ids).logits[0, :-1].float()
    reference = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return float((reference - torch.tensor(logprobs)).abs().max())
