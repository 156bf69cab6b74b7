"""The section `model`: the model that is trained, its added tokens and its adapters."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ptf.config.backends import BackendName
from ptf.config.section import INIT, Patterns, Plugin, Positive, PositiveFloat, Section


class TokensConfig(Section):
    """Tokens that are added to the tokenizer. The run starts from an extended copy of the model, which has rows for the
    new tokens; a token that the tokenizer already has keeps its id and its rows."""

    added: list[str] = []
    """Tokens, in the order of their ids."""
    file: str | None = None
    """jsonl file of further tokens; a row has `token` and, for `init: description`, `description`; `prepare:NAME`."""
    special: bool = False
    """Register the new tokens as special tokens, which decoding may leave out of the text."""
    init: Annotated[str, Field(pattern=INIT)] = "mean"
    """Initial rows of the new tokens in the embedding and in the head. `mean`: the mean of the rows in use.
    `description`: for each new token, the mean of the rows of the tokens in its description. Or a safetensors file
    (`prepare:tokens.safetensors`) with `embed` [tokens, width], in the order of the tokens, and, if the head is not
    tied to the embedding, `head` (if it is missing, the head's rows are initialised as with `mean`)."""

    @property
    def vectors(self) -> str | None:
        """Return the file of the initial rows, if there is one."""
        return self.init if self.init.endswith(".safetensors") else None


class LoraConfig(Section):
    """Low-rank adapters: the model's own weights stay as they are, unless `model.trainable` says otherwise."""

    rank: Positive = 16
    """Inner width of each adapter."""
    alpha: PositiveFloat = 32.0
    """The output of an adapter is multiplied by alpha / rank. rsLoRA's alpha / √rank, with which the output's size does
    not depend on the rank, is this with an alpha √rank times as large."""
    targets: Patterns = ["layers.*_proj"]
    """Projections that get an adapter, as patterns of ptf's module names, which are the same for every family:
    `layers.3.attn.q_proj` is Hugging Face's `model.layers.3.self_attn.q_proj`. A pattern matches the whole name, and
    `*` also matches dots (`*.q_proj`, `layers.*.moe.experts.*`). Default: every projection of attention, MLP and
    experts. Routers are left out, and the output head cannot have an adapter. With `model.backend: hf`, patterns match
    transformers' module names (`model.layers.*.self_attn.q_proj`), the default is every linear module of the layers but
    routers, and experts that are stacked in one parameter get no adapter."""


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """Hugging Face id (`owner/name`, or `owner/name@v1` with a branch, tag or commit), directory or URI of a
    checkpoint; `prepare:NAME`, a directory that `data.prepare` wrote; or `job:CONFIG`, the model that the job of that
    config last published. Other models (a reference, teachers, a reward model) are named in the same way."""
    tokenizer: str | None = None
    """Directory or Hugging Face id of the tokenizer, if it is not the model's own."""
    chat_template: str | None = None
    """File of a chat template (Jinja) that replaces the tokenizer's own; it is published with the model."""
    template_args: dict[str, Any] = {}
    """Arguments of the chat template (`enable_thinking: false`). They are its defaults in training, in generation and
    in the published model; a row's own arguments (`template_args` or `chat_template_kwargs`) override them."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` reads only config.json and draws the weights from `seed`."""
    backend: BackendName = "ptf"
    """`ptf`: our own decoder. `hf`: any causal language model of transformers, slower; it has no `model.replace`,
    `model.head`, `model.quantization`, tensor and context parallelism and load-balancing loss (ptf.model.hf_backend).
    Of a multimodal model it trains the language model, on text; the vision and audio parts are published as they
    are."""
    tokens: TokensConfig | None = None
    """Tokens to add."""
    replace: dict[str, Plugin] = {}
    """Components of your own, by a pattern of ptf's module names (`layers.*.mlp`, `layers.0.attn`). Each is constructed
    in place of the class there, with that class's arguments."""
    head: Plugin | None = None
    """An output head of your own, with its loss (docs/components.md); its tensors are exported to
    `head.safetensors`."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA). The run writes them to `adapter` (PEFT), and the merged model to `model`: each adapter is
    added in fp32 to the weight as the checkpoint stores it, and the sum is rounded once, to the checkpoint's dtype."""
    quantization: Literal["nf4", "mxfp4"] | None = None
    """Hold projections of the layers that do not train in four bits (QLoRA), which needs `lora` and makes steps longer.
    `nf4`: all of them, in 4.5 bits a weight instead of 16; it needs bitsandbytes (`pip install 'ptf[bitsandbytes]'`).
    Adapters learn beside the rounded weights, and the merged model has them added to the unrounded weights of the
    checkpoint, so it differs slightly from the model that was trained. `publish.what` says which of adapter and merged
    model is published. `mxfp4`: the experts of a checkpoint that stores them in MXFP4 (published GPT-OSS), in 4.25 bits
    as they are there; nothing is rounded."""
    trainable: Patterns | None = None
    """What trains, as patterns of ptf's parameter names or of the modules above them (`embed`, `layers.*.attn`); with
    `model.backend: hf`, of transformers' (`model.layers.*.self_attn`). Default: everything. With `lora` the adapters
    always train, and these patterns add to them."""
