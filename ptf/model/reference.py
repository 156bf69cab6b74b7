"""transformers' models that ptf's are compared with: of a checkpoint, of a random member of a family, of an export."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ptf.errors import UserError
from ptf.model import bridge, rounding
from ptf.model.config import Rope
from ptf.model.head import head_output
from ptf.model.layers import LayerFactory
from ptf.model.rope import rotary
from ptf.model.rounding import Double

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = 8  # tokens of the prompt of a generation


def quiet() -> None:
    """Switch off progress bars, and warnings about configs that are small on purpose."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Return transformers' model of a checkpoint."""
    quiet()
    from transformers import AutoConfig

    return _loaded(_kind(AutoConfig.from_pretrained(directory, trust_remote_code=False)), directory, dtype)


def _kind(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def _loaded(kind: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return corrected(kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager", trust_remote_code=False))


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
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _kind(hf).from_config(hf, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
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


@torch.no_grad()
def export_difference(
    directory: Path, tokens: Sequence[int], logprobs: Sequence[float], stops: Sequence[int] = ()
) -> float:
    """Return the largest difference of a log-prob of transformers, loaded from `directory`, and
    of the trained model.

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
    return rounding.difference(_logprobs_by(model, tokens), logprobs)


@torch.no_grad()
def export_rounding(directory: Path, tokens: Sequence[int]) -> float:
    """Return the same difference of transformers in bf16 and in fp32."""
    exact, rounded = (_logprobs_by(reference(directory, dtype), tokens) for dtype in (torch.float32, torch.bfloat16))
    return rounding.difference(rounded, exact)


def _logprobs_by(model: "PreTrainedModel", tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor([list(tokens)])
    return model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def _ends_at(model: "PreTrainedModel", prompt: Tensor, stop: int) -> bool:
    """Return whether greedy generation, with the model's own settings, ends where its first token is made `stop`."""
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
    """Return the largest difference of a head that is not the vocabulary's, over n tokens.

    `values` [n, …] are the trained model's. A scalar head is read as AutoModelForSequenceClassification does: after
    each prefix, and at the ends of two texts, the probe and its first half, which the published tokenizer pads. A head
    of the user's own is loaded from its file and given transformers' hidden states.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    quiet()
    ids, wanted = torch.tensor([list(tokens)]), torch.tensor(values)
    if not factory.pattern("head"):
        model = _loaded(AutoModelForSequenceClassification, directory)
        theirs = [model(input_ids=ids[:, :n]).logits[0, 0] for n in range(1, len(tokens) + 1)]
        two = [list(tokens), list(tokens[: len(tokens) // 2])]
        batch = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).pad(
            {"input_ids": two}, return_tensors="pt"
        )
        theirs += list(model(**batch).logits[:, 0])
        wanted = torch.cat([wanted, wanted[[len(text) - 1 for text in two]]])
        return rounding.difference(torch.stack(theirs), wanted)
    ours = bridge.load(directory, factory=factory)
    hidden = _loaded(AutoModel, directory)(input_ids=ids).last_hidden_state
    return rounding.difference(head_output(np.array(tokens, np.int32), hidden, ours.head).float(), wanted)
