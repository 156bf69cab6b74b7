"""The tokenizer: a thin layer over the one that AutoTokenizer loads, which alone decides which text becomes which ids.

A chat is rendered by the model's own chat template and by nothing else. What ends a turn is found by rendering probe
conversations with that template, not by knowing its family.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ptf.data.fingerprint import identity_of, raise_if_other_identity
from ptf.data.probes import PROBES, Message, closings_of, cuts_of, takes_text_arguments, with_text_arguments
from ptf.data.rendering import Rendering, with_arguments
from ptf.data.tokenizer_files import read_stop_ids, tokenizer_class, write_tokenizer
from ptf.errors import UserError, raise_if_custom_code
from ptf.storage.hub import at_revision


@dataclass(eq=False, repr=False)
class Tokenizer:
    """The tokenizer of a model: encoding, decoding, chat rendering, and what ends a turn."""

    hf: Any  # the tokenizer of transformers, whose type hints are stricter than its behaviour
    extra_stops: Sequence[int] = ()  # they end a response, too (the model's generation_config.json or config.json)
    rendering: Rendering = field(default_factory=Rendering)
    last_encoded: tuple[str, list[int]] = ("", [])  # a text and its ids (ptf.data.incremental_encode)

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """Load a tokenizer from a directory or a Hugging Face id (`owner/name` or `owner/name@revision`).

        The network is not used where HF_HUB_OFFLINE is set. Raises UserError where the files cannot be read.
        """
        local = os.path.isdir(path) or os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")
        id, revision = (path, None) if os.path.isdir(path) else at_revision(path)
        try:
            hf = tokenizer_class(id).from_pretrained(
                id, revision=revision, local_files_only=local, trust_remote_code=False
            )
        except Exception as e:  # transformers and tokenizers raise a dozen kinds of exceptions for damaged files
            raise_if_custom_code(id, e)
            reason = (
                next(iter(str(e).splitlines()), "")
                if isinstance(e, OSError | ValueError)
                else f"its files cannot be read: {type(e).__name__}: {e}"
            )
            raise UserError(f"no tokenizer in {id}: {reason}") from None
        return cls(hf, read_stop_ids(id, revision, local), Rendering.read(path))

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer, its generation config and its rendering settings into a directory."""
        source = Path(str(self.hf.name_or_path)) / "generation_config.json"  # it may hold more than stop ids
        config = json.loads(source.read_text()) if source.is_file() else {}
        write_tokenizer(self.hf, directory)
        if self.extra_stops:
            config = config if config.get("eos_token_id") else config | {"eos_token_id": list(self.extra_stops)}
            (Path(directory) / "generation_config.json").write_text(json.dumps(config))
        self.rendering.write(directory)

    def set_template(self, template: str | None, arguments: Mapping[str, Any]) -> None:
        """Replace the chat template (None: keep it), and give some of its arguments defaults."""
        chosen = template if template is not None else self.hf.chat_template
        if arguments and not chosen:
            raise UserError(
                "model.template_args: the tokenizer has no chat template to give them to; model.chat_template names one"
            )
        if isinstance(chosen, dict):
            chosen = {name: with_arguments(text, arguments) for name, text in chosen.items()}
        elif chosen:
            chosen = with_arguments(chosen, arguments)
        self.hf.chat_template = chosen
        self._forget()

    def add(self, tokens: Sequence[str], special: bool = False) -> None:
        """Add tokens with an id each, in this order, and forget what was derived from the old vocabulary."""
        self.hf.add_tokens(
            [AddedToken(token, normalized=False, special=special) for token in tokens], special_tokens=special
        )
        self._forget()

    def pad_with(self, id: int) -> None:
        """Make this id the padding token."""
        self.hf.pad_token = self.hf.convert_ids_to_tokens(id)
        self._forget()

    def _forget(self) -> None:
        """Drop the cached properties, which depend on the vocabulary and the chat template."""
        self.last_encoded = ("", [])
        cached = {name for name, member in vars(Tokenizer).items() if isinstance(member, cached_property)}
        self.__dict__ = {name: value for name, value in vars(self).items() if name not in cached}

    @property
    def vocab_size(self) -> int:
        """Return the number of ids in use; the model's embedding may have more rows."""
        return len(self.hf)

    @property
    def pad_id(self) -> int:
        """Return the id that fills the space after a document.

        Masks are computed from positions and never read it, so any id serves where a tokenizer has no pad token.
        """
        pad = self.hf.pad_token_id
        return pad if pad is not None else self.hf.eos_token_id or 0

    @cached_property
    def _unknown(self) -> int | None:
        """Return the id for text that cannot be encoded, or None where the named token means something else."""
        unk = self.hf.unk_token_id
        return None if unk in (self.hf.eos_token_id, self.hf.bos_token_id, self.hf.pad_token_id) else unk

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with nothing put before or after it."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what `encode` returns for each text, in one call, which costs less than one call per text."""
        if not texts:
            return []
        encoded = (
            self._encode_fast(texts)
            if self._is_plain
            else self.hf(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        )
        for text, ids in zip(texts, encoded, strict=True):
            if self._unknown is not None and self._unknown in ids:
                raise UserError(f"the tokenizer cannot encode all of {text if len(text) < 200 else text[:200] + '…'!r}")
        return encoded

    def _encode_fast(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts from the tokenizer of Rust, without the offsets and masks that the class adds.

        This takes 0.6 to 0.7 of the CPU time. Files may switch on truncation and padding; the class switches them off
        in each call, too.
        """
        backend = self.hf.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self.hf.split_special_tokens:
            backend.encode_special_tokens = self.hf.split_special_tokens
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _is_plain(self) -> bool:
        """Return whether the class only passes texts on to the tokenizer of Rust.

        A class that encodes in Python, or that changes texts before (Code Llama), is not plain. The probes verify it.
        """
        kind = type(self.hf)
        inherits = issubclass(kind, PreTrainedTokenizerFast) and all(
            getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("__call__", "_encode_plus", "_convert_encoding")
        )
        return inherits and self._encode_fast(PROBES) == self.hf(list(PROBES), add_special_tokens=False)["input_ids"]

    def begin(self, text: str) -> list[int]:
        """Return the ids of a text that begins a document, as servers encode a prompt.

        They begin with the tokens that the tokenizer puts before a document, such as `<s>`, where it puts any.
        """
        ids, plain = self.hf(text, verbose=False)["input_ids"], self.encode(text)
        before = next((k for k in range(len(ids) - len(plain) + 1) if ids[k : k + len(plain)] == plain), None)
        if before is None:
            raise UserError(
                f"the tokenizer {self.template_name.split('#')[0]} changes the ids of a text where it begins a "
                f"document: {text[:60]!r}"
            )
        return ids[: before + len(plain)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, special tokens included."""
        return self.hf.decode(np.asarray(ids, dtype=np.int64).tolist(), clean_up_tokenization_spaces=False)

    @cached_property
    def longest_token(self) -> int:
        """Return the length of the longest token, in characters or, for tokens of bytes, in bytes."""
        return max(map(len, self.hf.get_vocab()))

    @property
    def templates(self) -> dict[str, str | None]:
        """Return the chat templates by name; one without a name is `default`."""
        templates = self.hf.chat_template
        return templates if isinstance(templates, dict) else {"default": templates}

    @property
    def template_name(self) -> str:
        """Return the name of the chat template in messages: its origin and the start of its hash."""
        name = Path(str(self.hf.name_or_path)).name or "tokenizer"
        return f"{name}#{hashlib.sha256(str(self.hf.chat_template).encode()).hexdigest()[:8]}"

    def render_text(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the chat template writes it.

        With `generation_prompt` it ends where the model continues. `arguments` are the template's, and take precedence
        over its defaults. Raises UserError where there is no template, or where it refuses the messages.
        """
        if not self.hf.chat_template:
            raise UserError(
                f"the tokenizer {self.template_name.split('#')[0]} has no chat template: "
                "give model.tokenizer one that has, or model.chat_template"
            )
        try:
            return self.apply_template(
                with_text_arguments(messages) if self._text_arguments else list(messages),
                generation_prompt,
                tools,
                arguments or {},
            )
        except (TemplateError, TypeError, KeyError, IndexError) as e:
            raise UserError(
                f"chat template {self.template_name} refuses the messages: "
                f"{e} (model.chat_template can name another template)"
            ) from None

    def apply_template(
        self, messages: Sequence[Message], prompt: bool, tools: Any, arguments: Mapping[str, Any]
    ) -> str:
        """Return what the chat template makes of messages, without conversion of its errors."""
        return self.hf.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=prompt,
            tokenize=False,
            **{**self.rendering.arguments, **arguments},
        )

    _text_arguments = cached_property(takes_text_arguments)

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of `render_text`."""
        return self.encode(self.render_text(messages, generation_prompt, tools, arguments))

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end a response.

        They are what the template writes after an assistant's turn (first) and after a tool call, then eos and the ids
        of the generation config. Where the template writes several special tokens there, the one that eos or the config
        names is taken, else the last, because a server continues to it.
        """
        known = [i for i in (self.hf.eos_token_id, *self.extra_stops) if i is not None]
        turn, call = (self.closings[calls].special for calls in (False, True))
        stops = [next((i for i in turn if i in known), turn[-1])] if turn else []
        stops += known
        if call and not set(call) & set(stops):
            stops.append(call[-1])
        return tuple(dict.fromkeys(stops))

    closings = cached_property(closings_of)
    cuts = cached_property(cuts_of)

    identity = cached_property(identity_of)

    def differences(self, other: "Tokenizer") -> list[str]:
        """Return what decides ids and differs in another tokenizer, by name; each chat template is one."""
        ours, theirs = (
            {name: fact for name, fact in tokenizer.identity.items() if name not in ("fingerprint", "chat template")}
            | {f"chat template {name!r}": text for name, text in tokenizer.templates.items()}
            for tokenizer in (self, other)
        )
        return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]

    def raise_if_other_stops(self, stops: Sequence[int], what: str) -> None:
        """Raise UserError unless the ids that end a response are those of `what`."""
        if list(stops) != list(self.stop_ids):
            then, now = ([self.decode([i]) for i in ids] for ids in (stops, self.stop_ids))
            raise UserError(
                f"in {what} responses ended with {then}, now with {now}: the tokenizer's files or "
                "generation_config.json have changed; restore them"
            )

    def raise_if_different(self, identity: Mapping[str, Any], what: str) -> None:
        """Raise UserError unless `what` was made with this tokenizer; `identity` is the one that was stored with it."""
        raise_if_other_identity(self.identity, identity, what)

    def class_mismatch(self) -> str | None:
        """Describe how AutoTokenizer's class reads tokenizer.json differently from the file's content, or return None.

        Phi-3's class drops the normalizer, for example. ptf trains with AutoTokenizer's ids, as servers use them.
        """
        file = Path(str(self.hf.name_or_path)) / "tokenizer.json"
        if not file.is_file():
            return None
        backend = Backend.from_file(str(file))
        backend.no_truncation()
        for text, ids in self.identity["probes"]:
            if (plain := backend.encode(text, add_special_tokens=False).ids) != ids:
                return (
                    f"AutoTokenizer makes a {type(self.hf).__name__} of {file.parent}, "
                    f"whose ids differ from its tokenizer.json's: {text!r} is {ids}, not {plain}"
                )
        return None
