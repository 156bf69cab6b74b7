"""The language model inside a multimodal model of transformers (`model.backend: hf`), and what lies outside it.

Only text is trained, so the other parts (vision and audio towers, projectors) are taken out of the model and stay on
the meta device: they cost no memory, no name of theirs is a parameter's, and their tensors go from the checkpoint to
the export as they are. The language model is called by itself. Where the whole model is needed, to read names of a
checkpoint and to compare logits, the parts are put back for a moment.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ptf.errors import UserError

PARTS = ("text_config", "vision_config", "audio_config")
# (factor, soft-cap) that the whole model applies to logits are read from what it makes of these
KNOWN_LOGITS = (-64.0, -8.0, -1.0, 0.5, 3.0, 20.0)


def is_multimodal(c: Any) -> bool:
    """Return whether transformers' config is that of a model with other inputs than text."""
    return any(hasattr(c, part) for part in PARTS)


def text_config(c: Any) -> Any:
    """Return the config of the language model: of a model of text, the config itself."""
    return c.get_text_config() if is_multimodal(c) else c


def multimodal_class(c: Any) -> Any:
    """Return transformers' class of models with a language model that writes text about other inputs, or None."""
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    return next(
        (kind for kind in (AutoModelForImageTextToText, AutoModelForMultimodalLM) if type(c) in kind._model_mapping),
        None,
    )


def tied(c: Any) -> bool:
    """Return whether the head is the embedding, by transformers' config."""
    return bool(getattr(c, "tie_word_embeddings", getattr(text_config(c), "tie_word_embeddings", False)))


def language_model(hf: Any) -> Any:
    """Return the innermost model in `hf` that holds the embedding of tokens.

    Raise UserError if transformers has no such model of its own, which could be called by itself.
    """
    from transformers import PreTrainedModel

    embedding = hf.get_input_embeddings()
    around = [m for m in hf.modules() if isinstance(m, PreTrainedModel) and any(e is embedding for e in m.modules())]
    found = min(around, key=lambda m: sum(1 for _ in m.modules()), default=None)
    expected = text_config(hf.config).model_type
    if found is None or found.config.model_type != expected or text_config(hf.config) is hf.config:
        raise UserError(
            f"model.backend: hf: {hf.config.model_type} is multimodal, and its language model is no model of its own "
            "in transformers; use a checkpoint of text only"
        )
    return found


class Outside:
    """The parts of a multimodal model outside its language model and its head, taken out of the model. In a model of
    text there are none."""

    def __init__(self, hf: Any) -> None:
        kept = [language_model(hf), hf.get_output_embeddings()] if is_multimodal(hf.config) else [hf]
        inside = {id(m) for part in kept if part is not None for m in part.modules()}
        self.hf = hf
        # (owner, name, module) of the largest modules of which nothing is kept, and the parameters beside them
        self.modules: list[tuple[nn.Module, str, nn.Module]] = []
        self.parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._find(hf, inside)
        before, shapes = set(hf.state_dict()), {n: tuple(t.shape) for n, t in hf.state_dict().items()}
        buffers = {n for n, _ in hf.named_buffers(remove_duplicate=False)}
        self.take_out()
        self.shapes = {n: shapes[n] for n in before - set(hf.state_dict())}  # of the tensors of a checkpoint
        self.buffers = buffers - {n for n, _ in hf.named_buffers(remove_duplicate=False)}
        self.drawn: dict[str, Tensor] = {}  # values of random tensors

    def _find(self, module: nn.Module, inside: set[int]) -> None:
        for name, child in module.named_children():
            if id(child) in inside:
                continue
            if any(id(m) in inside for m in child.modules()):
                self._find(child, inside)
            else:
                self.modules.append((module, name, child))
        beside = module._parameters.items() if id(module) not in inside else ()
        self.parameters += [(module, n, p) for n, p in beside if p is not None]

    def take_out(self) -> None:
        """Take the parts out of the model."""
        for owner, name, _ in self.modules:
            del owner._modules[name]
        for owner, name, _ in self.parameters:
            del owner._parameters[name]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the parts in the model inside the `with` block."""
        for owner, name, module in self.modules:
            owner._modules[name] = module
        for owner, name, parameter in self.parameters:
            owner._parameters[name] = parameter
        try:
            yield
        finally:
            self.take_out()

    @contextlib.contextmanager
    def filled_when_called(self, device: torch.device) -> Iterator[None]:
        """Give modules that are called inside the `with` block parameters of ones: what is computed of text must not
        depend on their values."""
        filled: list[tuple[nn.Module, str, nn.Parameter]] = []

        def fill(module: nn.Module, _: Any) -> None:
            for each in module.modules():
                for name, p in each._parameters.items():
                    if p is not None and p.is_meta:
                        filled.append((each, name, p))
                        each._parameters[name] = nn.Parameter(torch.ones(p.shape, device=device), requires_grad=False)
                for name, b in each._buffers.items():
                    each._buffers[name] = None if b is None else b.to(device)

        hooks = [m.register_forward_pre_hook(fill) for _, _, part in self.modules for m in part.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, name, parameter in filled:
                module._parameters[name] = parameter


def applied_to_logits(hf: Any, scales: set[float], caps: set[float | None]) -> tuple[float, float | None]:
    """Return which factor and soft-cap a multimodal model applies to the logits of its head: some leave out what the
    same language model by itself applies.

    Call it where the model can be called. Raise UserError if it applies something else.
    """
    known = torch.tensor(KNOWN_LOGITS)

    def give(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return known.to(output.device, torch.float32).expand(*output.shape[:-1], -1)

    ids = torch.full((1, 1), 3, device=hf.get_input_embeddings().weight.device)
    with hf.get_output_embeddings().register_forward_hook(give):
        found = hf(input_ids=ids, use_cache=False).logits.flatten().float().cpu()
    for scale in sorted(scales, key=lambda s: abs(math.log(abs(s)))):
        for cap in sorted(caps, key=lambda c: c or 0):
            expected = known * scale if cap is None else cap * torch.tanh(known * scale / cap)
            if torch.allclose(found, expected, rtol=1e-5):
                return scale, cap
    raise UserError(
        f"model.backend: hf: the logits of {hf.config.model_type} are not its head applied to its hidden states; "
        "ptf cannot train it"
    )
