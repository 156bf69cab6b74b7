"""Any causal language model of transformers behind Decoder's interface (`model.backend: hf`), for architectures that
ptf does not define. Of a multimodal model its language model is trained, on text (hf_language_model.py).

Each document stands alone in the batch that transformers computes, padded on the right. In a causal model no token
attends to padding on its right, and the documents of a batch are independent, whether tokens are mixed by
attention or by something else. A batch costs its number of documents × the longest of them. The head is taken from the
model and checked against the model's own logits when it is loaded, so a model that computes logits in another way is
refused instead of trained wrongly (hf_checks.py).

Parameters are made on the meta device, sharded, and filled slice by slice from the checkpoint (hf_weights.py). Buffers
are made by the model's constructor on the CPU and never pass through meta, which would lose those that no checkpoint
stores, such as rotary frequencies. Adapters (LoRA) go to transformers' own modules (hf_adapters.py); a scalar head is
that of transformers' `...ForSequenceClassification`.

Left out: images and sounds, dropout (the model stays in evaluation mode, as ptf's own have none), the load-balancing
loss of experts, tensor and context parallelism, heads and components of the user's own, scalar heads of multimodal
models, adapters of experts that are stacked in one parameter, weights in four bits, rankings (`evaluate.ranking`), the
transports nccl and ipc of weights, `ptf plan`, `ptf chat` and `ptf serve`. `model.init: random` makes the whole model
in each process's memory.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from ptf.errors import UserError, first_line, raise_if_custom_code
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.decoder import HeadFn
from ptf.model.head import HF_NAME, Head, Scalar, is_scalar
from ptf.model.hf_adapters import PREFIX, HFPeftFormat, adapt, described
from ptf.model.hf_checks import check
from ptf.model.hf_language_model import Outside, is_multimodal, language_model, multimodal_class, text_config, tied
from ptf.model.hf_weights import (
    Groups,
    InMemory,
    assigned,
    fill_from,
    in_stored_form,
    parameters_on_meta,
    targets_of,
)
from ptf.model.kernels.delta_rule import Spans
from ptf.model.layers import LayerFactory
from ptf.model.lora import adapter_names, init_adapters, keyed, merged_weights
from ptf.model.model import Carried, Model
from ptf.model.model_files import export_dtype, read_config, stored_dtypes, unties
from ptf.model.sharded_tensor import fill
from ptf.model.tensor_files import HEADS, Headers, TensorFiles

# name of a factor of the logits in config.json → its exponent
SCALES = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
# names of the soft-cap of the logits
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# ends of the names of tokens in config.json, and beginnings of those that are text
PLACEHOLDERS, TEXTUAL = ("_token_id", "_token_index"), ("bos", "eos", "pad", "sep", "cls", "mask", "decoder")
SCORE = "score"  # transformers' name of a scalar head


class HFDecoder(Model):
    """A model of transformers."""

    supports_compilation = first_layers_stand_alone = supports_shared_prefixes = False

    def __init__(self, hf: Any, head: Literal["lm", "scalar"], factory: LayerFactory) -> None:
        super().__init__()
        self.hf, self.kernels = hf, factory.kernels
        self.text_config = text_config(hf.config)
        self.config = replace(sizes(hf.config), head=head)
        self.outside = Outside(hf)
        self.factory = factory
        self.scale = 1.0  # factor of the logits
        for key, power in SCALES.items():
            if head == "lm" and (factor := getattr(self.text_config, key, None)):
                self.scale *= float(factor) ** power
        self.softcap = next((cap for key in SOFTCAPS if (cap := getattr(self.text_config, key, None))), None)
        self.eval()

    def train(self, mode: bool = True) -> "HFDecoder":
        """Keep the evaluation mode, whatever `mode` is."""
        return super().train(False)

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        """The output projection of transformers' model."""
        return getattr(self.hf, SCORE) if self.config.head == "scalar" else self.hf.get_output_embeddings()

    @property
    def body(self) -> nn.Module:
        """The part of transformers' model that computes hidden states of text."""
        if is_multimodal(self.hf.config):
            return language_model(self.hf)
        if self.hf.base_model is not self.hf:
            return self.hf.base_model
        return next(m for m in self.hf.children() if hasattr(m, "base_model_prefix"))  # its prefix names no module

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The layers, which are sharded one by one."""
        lists = [m for m in self.body.modules() if isinstance(m, nn.ModuleList) and len(m) == len(self.config.layers)]
        if not lists:
            raise UserError(
                f"model.backend: hf: {self.hf.config.model_type}: there is no list of {len(self.config.layers)} layers "
                "in transformers' model"
            )
        return lists[0]

    @property
    def table_rows(self) -> int:
        """The number of tokens that the language model can embed by itself; ids beyond stand for images and sounds."""
        vocab = self.config.vocab
        return min(vocab, getattr(self.text_config, "vocab_size_per_layer_input", None) or vocab)

    @property
    @override
    def text_tokens(self) -> Tensor:
        settings = self.hf.config.to_dict() if is_multimodal(self.hf.config) else {}
        ids = [settings[key] for key in settings if key.endswith(PLACEHOLDERS) and not key.startswith(TEXTUAL)]
        others = {token for value in ids for token in (value if isinstance(value, list) else [value])}
        return torch.tensor([token for token in range(self.table_rows) if token not in others])

    @override
    def attention_name(self, device: torch.device) -> str:
        return "transformers' (a sequence for each document; no dropout, no load-balancing loss)"

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
            limit, lengths = self.switches_at, segments[segments >= 0].unique_consecutive(return_counts=True)[1]
            lengths = lengths[lengths > 1]  # one token attends to itself with any frequencies
            if len(lengths) and int(lengths.min()) <= limit < int(lengths.max()):
                raise UserError(
                    f"model.backend: hf: with longrope, transformers computes different logits for "
                    f"documents of at most {limit} tokens if their batch has a longer one (here {int(lengths.max())}). "
                    f"Train documents of at most {limit} tokens (data.seq_len: {limit}), or longer ones alone"
                )
        if self.table_rows < self.config.vocab and int(largest := tokens.max()) >= self.table_rows:
            raise UserError(
                f"model.backend: hf: token {int(largest)} stands for an image or a sound in "
                f"{self.hf.config.model_type}, of which only text is trained (ids below {self.table_rows}); take it "
                "out of the data"
            )
        hidden = self.body(input_ids=tokens.reshape(-1)[index], use_cache=False)[0]  # [documents, longest, D]
        head = self.output()
        x = hidden.flatten(0, 1)[back].view(*tokens.shape, -1).to(head.weight.dtype)  # some keep fp32 between layers
        return head_fn(x if self.scale == 1 else x * self.scale, head)

    @property
    def switches_at(self) -> int | None:
        """The number of tokens beyond which the rotary frequencies of all documents of a batch change, if they do."""
        parameters = getattr(self.text_config, "rope_parameters", None) or {}
        by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
        limits = [
            rope.get("original_max_position_embeddings")
            for rope in [rope for rope in (parameters, *by_layer_type) if rope.get("rope_type") == "longrope"]
        ]
        return min((int(limit) for limit in limits if limit), default=None)

    def output(self) -> Head | Scalar:
        """Return the head that `head_fn` is given. Call it inside `forward` only."""
        weight = cast("Tensor", self.head.weight)
        if self.config.head == "scalar":
            return Scalar(weight)
        bias = getattr(self.head, "bias", None)
        bias = bias if bias is None or self.scale == 1 else bias * self.scale
        return Head(weight, self.config.vocab, self.softcap, bias)

    def load_balancing_loss(self) -> None:
        """Return None: there is no load-balancing loss."""

    @override
    def hf_tensors(self, source: Path | None = None) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self, FSDPModule):
            self.reshard()
        weight = merged_weights(self)
        yield from in_stored_form(self.hf, self._stored(), lambda name: weight(PREFIX + name))

    @override
    def hf_names(self) -> set[str]:
        values = self._stored()
        return {
            name
            for name, _ in in_stored_form(self.hf, values, lambda name: torch.empty_like(values[name], device="meta"))
        }

    @override
    def load_hf_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        with self.outside.put_back():
            _, problems = fill_from(self.hf, InMemory(tensors), carried=self.outside.shapes)
        if problems:
            raise KeyError("; ".join(problems))

    @override
    def exact_names(self) -> set[str]:
        return {name for name, _ in self.hf.named_buffers()}

    @override
    def stored_in_fp32(self, directory: Path) -> set[str]:
        wide = {name for name, dtype in stored_dtypes(directory).items() if dtype == torch.float32}
        return {PREFIX + name for name in self._assigned(wide)[0]} if wide else set()

    @override
    def peft(self) -> HFPeftFormat:
        return HFPeftFormat(self)

    @override
    def unstored_names(self) -> set[str]:
        return {PREFIX + HF_NAME} if self.config.head == "scalar" else set()

    @override
    def raise_if_outside(self, key: str, patterns: Sequence[str]) -> None:
        def match(pattern: str, names: Collection[str]) -> bool:
            return any(fnmatchcase(part, pattern) for n in names for part in accumulate(n.split("."), "{}.{}".format))

        inside = [name for name, _ in self.hf.named_parameters()]
        if found := [p for p in patterns if match(p, self.outside.shapes) and not match(p, inside)]:
            raise UserError(
                f"{key}: {', '.join(found)} is outside the language model of {self.hf.config.model_type}, and only "
                "that is trained, on text; the rest goes to the export as it is. Leave it out"
            )

    @override
    def notes(self) -> list[str]:
        return [described(self)] if self.factory.lora else []

    @override
    def raise_if_unfit(self, directory: Path) -> None:
        with Headers(directory) as files:
            fill_from_files(cast("HFDecoder", self.to("meta")), files)

    def _assigned(self, names: Collection[str]) -> tuple[dict[str, str], Groups]:
        """Return what becomes of the tensors of a checkpoint with these names, as `hf_weights.assigned` does."""
        with self.outside.put_back():
            return assigned(self.hf, names, targets_of(self.hf), self.outside.shapes)[:2]

    def carried_names(self, files: TensorFiles) -> set[str]:
        """See Model: those outside the language model, and those that transformers ignores, such as layers that predict
        further tokens."""
        renamed, groups = self._assigned(files.names)
        left = files.names - {*renamed.values()} - {source for _, sources in groups.values() for source, _ in sources}
        other_heads = HEADS if self.config.head == "scalar" else f".{SCORE}.weight"
        return {name for name in left if not f".{name}".endswith(other_heads)}

    def carried(self, source: Path) -> Iterator[Carried]:
        """See Model; of a random multimodal model, those that were drawn."""
        if drawn := self.outside.drawn:
            for name, tensor in in_stored_form(self.hf, drawn, drawn.__getitem__):
                yield name, tensor, export_dtype(source)
            return
        yield from super().carried(source)

    def give_weights(
        self, directory: Path, device: torch.device, *, random: bool = False, seed: int = 0
    ) -> tuple[str, ...]:
        """See Model. What it computes is checked (hf_checks.py)."""
        first: dict[int, str] = {}
        ties = [
            (name, first[id(p)])
            for name, p in self.hf.named_parameters(remove_duplicate=False)
            if first.setdefault(id(p), name) != name
        ]
        self._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
        for name, other in ties:
            owner, _, leaf = name.rpartition(".")
            self.hf.get_submodule(owner)._parameters[leaf] = self.hf.get_parameter(other)
        if random:
            new: tuple[str, ...] = ()
            c = self.hf.config
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn = _model_class(c, self.config.head).from_config(c, dtype=torch.float32, trust_remote_code=False)
            values = drawn.state_dict()
            self.outside.drawn = {name: values.pop(name) for name in self.outside.shapes}
            for name, target in targets_of(self.hf).items():
                fill(target, values[name].__getitem__)
        else:
            with TensorFiles(directory) as files:
                new = fill_from_files(self, files)
        for name in new:
            std = getattr(self.hf.config, "initializer_range", None) or 0.02
            generator = torch.Generator().manual_seed(keyed(seed, name))
            parameter = self.hf.get_parameter(name)
            fill(parameter, torch.empty(parameter.shape).normal_(0, std, generator=generator).__getitem__)
        init_adapters(self, seed)
        check(self)
        return new

    def vocabulary_tables(self, names: Collection[str]) -> dict[str, str]:
        """See Model. Raise UserError for one that takes ids after its last token for images and sounds."""
        if self.table_rows < self.config.vocab:
            raise UserError(
                f"model.tokens: in {self.hf.config.model_type} ids from {self.table_rows} on stand for images and "
                "sounds, so it has none for new tokens; use its unused tokens"
            )
        tables, embed = {}, self.hf.get_input_embeddings()
        heads = [("head", self.head)] if self.config.head == "lm" else []
        for which, module in (("embed", embed), *heads):
            path = next(path for path, m in self.hf.named_modules() if m is module)
            tables[f"{path}.weight"] = "embed" if module.weight is embed.weight else which
            if getattr(module, "bias", None) is not None:
                tables[f"{path}.bias"] = "bias"
        for path, _ in self.hf.named_modules():
            if path.endswith(".embed_tokens_per_layer"):
                tables[f"{path}.weight"] = "embed_per_layer"
        return {stored: tables[name] for name, stored in self._assigned(names)[0].items() if name in tables}

    def _stored(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by transformers' names; tied ones are listed under one name."""
        names = {n for n, _ in (*self.hf.named_parameters(), *self.hf.named_buffers())} - adapter_names(self.hf)
        return {n: t for n, t in self.hf.state_dict().items() if n in names}


def document_places(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index maps between the flat batch and the batch with one document on each line.

    The first is, for each place of [documents, longest], the flat index of its token; the second is, for each flat
    index, the place of its token. Filling repeats a document's last token; padding of the batch maps to an arbitrary
    place. Without a document the first token stands for one.
    """
    starts, lengths, *_ = Spans.of(segments)
    if not len(starts):
        starts, lengths = np.zeros(1, np.int64), np.ones(1, np.int64)
    step = np.arange(lengths.max())
    index = starts[:, None] + np.minimum(step, lengths[:, None] - 1)
    inside = step < lengths[:, None]
    back = np.zeros(segments.numel(), np.int64)
    back[index[inside]] = np.flatnonzero(inside.reshape(-1))
    return torch.from_numpy(index).to(segments.device), torch.from_numpy(back).to(segments.device)


def decoder_config(directory: Path) -> DecoderConfig:
    """Return the sizes of transformers' model of a directory; weights are not read."""
    return sizes(configured(directory))


def sizes(c: Any) -> DecoderConfig:
    """Return the sizes of a model from transformers' config, without what makes the architecture."""
    is_tied, c = tied(c), text_config(c)
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
        tied=is_tied,
        layers=(Layer(Rope(0.0)),) * c.num_hidden_layers,
    )


def rows(config: Mapping[str, Any]) -> int:
    """Return the number of tokens that a config.json has rows for, by transformers' defaults if it does not say."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.items() if key != "model_type"}
    return text_config(AutoConfig.for_model(str(config["model_type"]), **values)).vocab_size


def configured(directory: Path) -> Any:
    """Return transformers' config of a directory.

    Raise UserError, with the reason, for anything but a causal language model, or a multimodal model that has one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        c = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise_if_custom_code(directory, error)
        raise UserError(
            f"model.backend: hf: transformers has no such architecture: {directory}: {first_line(error)}"
        ) from error
    text, multimodal = text_config(c), is_multimodal(c)
    if unties(directory):
        c.tie_word_embeddings = text.tie_word_embeddings = False
    methods = [(getattr(each, "quantization_config", None) or {}).get("quant_method", "") for each in (c, text)]
    encodes = any(getattr(each, "is_encoder_decoder", False) for each in (c, text))
    faults = {
        f"it is quantised ({max(methods)}); use the checkpoint it was made from": any(methods),
        "it is multimodal, and transformers has no model of it that writes text": multimodal
        and multimodal_class(c) is None,
        "its tokens attend to later ones (use_bidirectional_attention), as PaliGemma's do in a prompt; only causal "
        "language models can be trained": getattr(text, "use_bidirectional_attention", None) in (True, "all"),
        "it has an encoder; only causal language models can be trained": encodes,
        "transformers has no causal language model of it": not multimodal
        and type(c) not in AutoModelForCausalLM._model_mapping,
    }
    if reasons := [fault for fault, present in faults.items() if present]:
        raise UserError(f"model.backend: hf: {directory} ({c.model_type}): {'; '.join(reasons)}")
    return c


def build(
    directory: Path, *, head: Literal["lm", "scalar"] | None = None, factory: LayerFactory | None = None
) -> HFDecoder:
    """Return a model whose parameters are on the meta device; of `factory` it has the adapters.

    `head` is the kind of head; None takes that of the checkpoint. Raise UserError for a model that cannot be trained,
    and for an adapter that matches nothing.
    """
    c = configured(directory)
    head = head or ("scalar" if is_scalar(read_config(directory)) else "lm")
    with parameters_on_meta():
        try:
            hf = _model_class(c, head).from_config(c, dtype=torch.float32, trust_remote_code=False)
        except ImportError as error:  # packages of a vision tower, such as timm
            raise UserError(
                f"model.backend: hf: {c.model_type}: transformers needs a further package: {first_line(error)}"
            ) from error
        model = HFDecoder(hf, head, factory or LayerFactory())
        assert model.layers  # named if there are none
        if model.head is None:
            raise UserError(f"model.backend: hf: {c.model_type}: there is no output projection in transformers' model")
        if model.factory.lora is not None:
            adapt(model, model.factory.lora)
    return model


def _model_class(c: Any, head: str) -> Any:
    """Return transformers' class of models with this head; raise UserError if there is none."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if head == "lm":
        return multimodal_class(c) if is_multimodal(c) else AutoModelForCausalLM
    if is_multimodal(c):
        raise UserError(
            f"model.backend: hf: {c.model_type} is multimodal, and a scalar head (reward models, critics) is trained "
            "on models of text only; give such a model"
        )
    c.num_labels = 1
    if type(c) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"model.backend: hf: {c.model_type} has no scalar head (reward models, critics): transformers has no "
            "classifier of it"
        )
    return AutoModelForSequenceClassification


def fill_from_files(model: HFDecoder, files: TensorFiles) -> tuple[str, ...]:
    """Fill the model, which may be on the meta device, and return the names of tensors of a head that is new. Raise
    UserError that lists every missing, unexpected or misshapen tensor."""
    scalar, head = model.config.head == "scalar", f"{SCORE}.weight"
    body = next(path for path, module in model.hf.named_modules() if module is model.body) + "."
    try:
        with model.outside.put_back():
            new, problems = fill_from(
                model.hf,
                files,
                lacks={head} if scalar else (),
                # a head that this model does not have
                ignores=lambda name: not name.startswith(body) if scalar else name == head,
                carried=model.outside.shapes,
            )
    except SafetensorError as error:
        raise UserError(f"model.path: {files.directory} cannot be read: {error}") from error
    if problems:
        raise UserError(f"model.path: {files.directory} does not fit its config.json:\n  " + "\n  ".join(problems))
    return new
