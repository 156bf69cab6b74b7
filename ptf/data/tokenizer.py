"""The tokenizer: a thin layer over the one that AutoTokenizer loads, which alone decides which text becomes which ids.

A chat is rendered by the model's own chat template and by nothing else. What ends a turn is found by rendering probe
conversations with that template, not by knowing its family. This is the only import of transformers in ptf.data.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ptf.data.event_tokens import END, EVENT, PAD, START, UNKNOWN
from ptf.data.rendering import Rendering, with_arguments
from ptf.errors import UserError, refuse_custom_code

Message = Mapping[str, Any]

PROBES = (
    "Hello, world!",
    "  two  spaces\tand a tab",
    "\n\nnewlines\n",
    "naïve café Ångström ﬁ ①",
    "数学 русский العربية हिन्दी",
    "👩‍👩‍👧 emoji",
    "1234567.89e-10",
    "don't DON'T it's",
    "<|im_end|></s><|endoftext|>",
    "a\u0301 \u00e1",
    "x=  y;\r\n",
    "\u200b\ufeff",
)


# Model families for which AutoTokenizer follows tokenizer_config.json where that names no class of the family's own.
PLAIN_FAMILIES = frozenset({None, "gemma3", "gemma3_text", "gpt_oss", "llama", "qwen3", "qwen3_moe"})
PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})


def tokenizer_class(path: str) -> Any:
    """Return AutoTokenizer, or the class that it would choose where the directory's files leave one choice.

    Importing AutoTokenizer takes 2.7 CPU-seconds in every process of a run, because it imports all of
    `transformers.generation`, scikit-learn and torch._dynamo.
    """
    directory = Path(path)
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        family = (
            json.loads((directory / "config.json").read_text()).get("model_type")
            if (directory / "config.json").exists()
            else None
        )
    except (OSError, ValueError):
        config, family = {}, None
    plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config and family in PLAIN_FAMILIES
    if plain and (directory / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


class Tokenizer:
    """The tokenizer of a model: encoding, decoding, chat rendering, and what ends a turn."""

    def __init__(self, hf: PreTrainedTokenizerBase, extra_stops: Sequence[int] = ()):
        """Wrap a tokenizer of transformers.

        `extra_stops` are ids that also end an answer, from the model's generation_config.json.
        """
        self.hf: Any = hf  # the type hints of transformers are stricter than its behaviour
        self._extra_stops = tuple(extra_stops)
        self.rendering = Rendering()

    @classmethod
    def load(cls, path: str, revision: str | None = None) -> "Tokenizer":
        """Load a tokenizer from a directory or a Hugging Face id.

        The network is not used where HF_HUB_OFFLINE is set. Raises UserError where the files cannot be read.
        """
        local = os.path.isdir(path) or os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")
        try:
            hf: Any = tokenizer_class(path).from_pretrained(
                path, revision=revision, local_files_only=local, trust_remote_code=False
            )
        except Exception as e:  # transformers and tokenizers raise a dozen kinds of exceptions for damaged files
            refuse_custom_code(path, e)
            reason = (
                next(iter(str(e).splitlines()), "")
                if isinstance(e, OSError | ValueError)
                else f"its files cannot be read: {type(e).__name__}: {e}"
            )
            raise UserError(f"no tokenizer in {path}: {reason}") from None
        try:
            stops = GenerationConfig.from_pretrained(
                path,
                revision=revision,  # type: ignore[arg-type]
                local_files_only=local,
            ).eos_token_id
        except OSError as e:
            if (file := Path(path) / "generation_config.json").is_file():
                raise UserError(
                    f"{file} cannot be read, so the ids that end an answer are not known; restore it: "
                    f"{next(iter(str(e).splitlines()), '')}"
                ) from None
            stops = None
        tokenizer = cls(hf, stops if isinstance(stops, list) else [] if stops is None else [stops])
        tokenizer.rendering = Rendering.read(path)
        return tokenizer

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer, its generation config and its rendering settings into a directory."""
        source = Path(str(self.hf.name_or_path)) / "generation_config.json"  # it may hold more than stop ids
        config = json.loads(source.read_text()) if source.is_file() else {}
        self.hf.save_pretrained(directory)
        if self._extra_stops:
            config = config if config.get("eos_token_id") else config | {"eos_token_id": list(self._extra_stops)}
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

    def _forget(self) -> None:
        """Drop the cached properties, which depend on the vocabulary and the chat template."""
        for name in ("_unknown", "_closings", "_text_arguments", "stop_ids", "cuts", "identity"):
            self.__dict__.pop(name, None)

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
        encoded = self.hf(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        for text, ids in zip(texts, encoded, strict=True):
            if self._unknown is not None and self._unknown in ids:
                raise UserError(f"the tokenizer cannot encode all of {text if len(text) < 200 else text[:200] + '…'!r}")
        return encoded

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
            return self._rendered(
                _with_text(messages) if self._text_arguments else list(messages),
                generation_prompt,
                tools,
                arguments or {},
            )
        except (TemplateError, TypeError, KeyError, IndexError) as e:
            raise UserError(
                f"chat template {self.template_name} refuses the messages: "
                f"{e} (model.chat_template can name another template)"
            ) from None

    def _rendered(self, messages: Sequence[Message], prompt: bool, tools: Any, arguments: Mapping[str, Any]) -> str:
        """Return what the chat template makes of messages, without conversion of its errors."""
        template_arguments = {**self.rendering.arguments, **arguments}
        return self.hf.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **template_arguments
        )

    @cached_property
    def _text_arguments(self) -> bool:
        """Return whether the template takes the arguments of tool calls as JSON text only (DeepSeek-V3).

        This is found by rendering a probe.
        """
        for call in (_tool_call("1"), _with_text(_tool_call("1"))):
            try:
                self._rendered(call, False, None, {})
                return isinstance(call[-1]["tool_calls"][0]["function"]["arguments"], str)
            except (TemplateError, TypeError, KeyError, IndexError):
                continue
        return False

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
        """Return the ids that end an answer.

        They are what the template writes after an assistant's turn (first) and after a tool call, then eos and the ids
        of the generation config. Where the template writes several special tokens there, the one that eos or the config
        names is taken, else the last, because a server continues to it.
        """
        known = [i for i in (self.hf.eos_token_id, *self._extra_stops) if i is not None]
        turn, call = (self._closings[kind].special for kind in ("answer", "call"))
        stops = [next((i for i in turn if i in known), turn[-1])] if turn else []
        stops += known
        if call and not set(call) & set(stops):
            stops.append(call[-1])
        return tuple(dict.fromkeys(stops))

    def closing(self, calls: bool) -> str:
        """Return what the template writes after a turn only when the next message follows (GLM: the tag of its role).

        It ends with the token at which a server stops; it is "" where a turn has an end of its own. `calls`: for a turn
        that calls tools, which their results follow.
        """
        return self._closings["call" if calls else "answer"].borrowed

    def follows(self, calls: bool) -> str:
        """Return what the template writes after the stop token of a conversation's last turn.

        It does not depend on the turn's content. It is a line break, an end of the document, or (Command-R) the next
        generation prompt.
        """
        ending = self._closings["call" if calls else "answer"].last
        end = next((n for n, i in enumerate(ending) if i in self.stop_ids), len(ending))
        return self.decode(ending[end + 1 :])

    @cached_property
    def _closings(self) -> dict[str, "_Closing"]:
        """Return how the template closes an answer and a tool call."""
        special = set(self.hf.all_special_ids) | {
            i for i, token in self.hf.added_tokens_decoder.items() if token.special
        }
        closings = {}
        for kind, (build, then) in {"answer": (_answer, _USER), "call": (_tool_call, _RESULT)}.items():
            last, inside = self._ending(build), self._ending(lambda word, build=build, then=then: [*build(word), then])
            both = next(
                (n for n, (a, b) in enumerate(zip(last, inside, strict=False)) if a != b), min(len(last), len(inside))
            )
            own = [i for i in last[:both] if i in special] or [i for i in last if i in special]
            borrowed = [i for i in inside if i in special][:1]
            if own or not borrowed:
                closings[kind] = _Closing(own, last)
                continue
            text, continued = self._probe(build("1")), self._probe([*build("1"), then])
            stop = self.decode(borrowed)
            start = len(text) if continued.startswith(text) else continued.rindex(stop)
            end = continued.index(stop, start) + len(stop)
            closings[kind] = _Closing(borrowed, last, continued[start:end])
        return closings

    def _probe(self, messages: Sequence[Message]) -> str:
        """Return the render of a probe conversation, with a system message where the template requires one."""
        try:
            return self.render_text(messages, False)
        except UserError:  # some templates require a system message
            return self.render_text([{"role": "system", "content": "0"}, *messages], False)

    def _ending(self, build: Any) -> list[int]:
        """Return the ids that follow a turn whatever its content: the common ending of two turns that differ."""
        if not self.hf.chat_template:
            return []
        try:
            a, b = (self.hf(self._probe(build(word)), add_special_tokens=False)["input_ids"] for word in ("1", "2"))
        except UserError:  # the template supports no such turn
            return []
        n = 0
        while a != b and a[-1 - n] == b[-1 - n]:
            n += 1
        return a[len(a) - n :]

    @cached_property
    def cuts(self) -> dict[str, int]:
        """Return the stop ids, by their text, at which a text splits into two parts that are encoded independently.

        Added tokens split a text like this; the probes verify it, and where they disagree no cut is returned.
        """
        cuts = {self.decode([i]): i for i in self.stop_ids if i in self.hf.added_tokens_decoder}
        texts = [
            t
            for cut in cuts
            for a, b in zip(PROBES, PROBES[1:] + PROBES[:1], strict=True)
            for t in (a + cut + b, a + cut, cut + b)
        ]
        ids = iter(self.hf(texts, add_special_tokens=False)["input_ids"] if texts else [])
        cut_ids = (i for i in cuts.values() for _ in PROBES)
        return (
            cuts
            if all(
                left[-1] == right[0] == i and whole == left[:-1] + right
                for i, whole, left, right in zip(cut_ids, ids, ids, ids, strict=True)
            )
            else {}
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 of what decides ids: see `identity`."""
        return self.identity["fingerprint"]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return what decides ids, to be stored with data that was made with this tokenizer.

        It holds the SHA-256 of the vocabulary, merges, special tokens and chat template, the ids of probe strings
        (which detect a lost normalizer), and one `fingerprint` of all.
        """
        backend = getattr(self.hf, "backend_tokenizer", None)
        backend_config = json.loads(backend.to_str()) if backend is not None else {}
        model = backend_config.get("model", {})
        steps = {name: backend_config.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}
        facts = {
            "vocabulary": sorted(self.hf.get_vocab().items()),
            "merges": model.get("merges"),
            "special tokens": dict(sorted(self.hf.special_tokens_map.items())),
            "chat template": self.hf.chat_template,
            # How a text is split into pieces, and how the pieces are joined.
            "steps": steps | {key: value for key, value in model.items() if key not in ("vocab", "merges")},
        }
        identity: dict[str, Any] = {name: _digest(fact) for name, fact in facts.items()}
        identity["probes"] = [[text, self.hf(text, add_special_tokens=False)["input_ids"]] for text in PROBES]
        if self.rendering.facts:  # without such settings the fingerprint does not depend on them
            identity["rendering"] = self.rendering.facts
        return {"fingerprint": _digest(identity), **identity}

    def refuse_other_stops(self, stops: Sequence[int], what: str) -> None:
        """Raise UserError unless the ids that end an answer are those of `what`."""
        if list(stops) != list(self.stop_ids):
            then, now = ([self.decode([i]) for i in ids] for ids in (stops, self.stop_ids))
            raise UserError(
                f"in {what} answers ended with {then}, now with {now}: the tokenizer's files or "
                "generation_config.json have changed; restore them"
            )

    def refuse_other(self, identity: Mapping[str, Any], what: str) -> None:
        """Raise UserError unless `what` was made with this tokenizer; `identity` is the one that was stored with it.

        The message names the first probe or part that differs.
        """
        if identity.get("fingerprint") == self.fingerprint():
            return
        now = dict(self.identity["probes"])
        for text, ids in identity.get("probes", ()):
            if text in now and now[text] != ids:
                raise UserError(
                    f"{what} was made with another tokenizer than the model's: of {text!r} that one made {ids}, "
                    f"this one {now[text]}"
                )
        then, today = ((facts.get("rendering") or {}).get("date") for facts in (identity, self.identity))
        if then != today:
            raise UserError(
                f"{what} was made with a chat template that rendered the date {then}, not {today}: set data.date, "
                "or make it again"
            )
        names = dict.fromkeys((*identity, *self.identity))
        parts = [
            name
            for name in names
            if name not in ("fingerprint", "probes") and identity.get(name) != self.identity.get(name)
        ]
        raise UserError(
            f"{what} was made with another tokenizer than the model's: they differ in their {' and '.join(parts)}"
        )

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
                example = f"{text!r} is {ids}, not {plain}"
                return (
                    f"AutoTokenizer makes a {type(self.hf).__name__} of {file.parent}, "
                    f"whose ids differ from its tokenizer.json's: {example}"
                )
        return None


class _Closing(NamedTuple):
    """How a template closes a turn."""

    special: list[int]  # the special ids that end the turn
    last: list[int]  # all ids that follow the last turn of a conversation
    borrowed: str = ""  # what is written only when the next message follows


def _digest(fact: Any) -> str:
    """Return the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(fact, ensure_ascii=False, default=str).encode()).hexdigest()


def _answer(word: str) -> list[Message]:
    """Return a probe conversation that ends with an answer."""
    return [{"role": "user", "content": "1"}, {"role": "assistant", "content": word}]


def _tool_call(word: str) -> list[Message]:
    """Return a probe conversation that ends with a tool call."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": word}}}
    return [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _with_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of their calls as JSON text."""

    def with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {
            **call,
            "function": {**function, "arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)},
        }

    return [
        {**m, "tool_calls": [with_json_arguments(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


_USER = {"role": "user", "content": "3"}
_RESULT = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "f"}
ROLES = ("system", "user", "assistant", "tool")
CHARACTER_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|><|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>' }}{% endif %}"
)


def character_tokenizer(alphabet: str, directory: str | Path) -> Tokenizer:
    """Write a tokenizer with one id per character as a directory for AutoTokenizer, and load it.

    It is for tasks small enough for a CPU. `encode` refuses characters outside the alphabet.
    """
    special = ["<|pad|>", "<unk>", "<|im_start|>", "<|im_end|>", *(f"<|{role}|>" for role in ROLES)]
    vocab = {token: i for i, token in enumerate([*special, *sorted(set(alphabet))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[token for token in special if token not in ("<|pad|>", "<unk>", "<|im_end|>")],
    )
    hf.chat_template = CHARACTER_TEMPLATE
    hf.save_pretrained(directory)
    return Tokenizer.load(str(directory))


# The template leaves out the assistant's messages: what was recommended is not what happened.
USER_TEXT_TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def event_tokenizer(tokens: Iterable[str], directory: str | Path, of: str = "") -> Tokenizer:
    """Write a tokenizer of exactly these tokens (`<…>` each) as a directory for AutoTokenizer, and load it.

    Its chat template writes the content of user messages unchanged, and nothing else. `of` names what the tokens stand
    for; it is a comment in the template, and so part of the fingerprint. Raises UserError for a token that occurs twice
    or has another form.
    """
    vocabulary: dict[str, int] = {}
    for token in (PAD, UNKNOWN, END, START, *tokens):
        if token in vocabulary or not re.fullmatch(EVENT, token):
            raise UserError(
                f"the token {token!r} is {'listed twice' if token in vocabulary else 'not of the form <…>'}"
            )
        vocabulary[token] = len(vocabulary)
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(EVENT), "isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, clean_up_tokenization_spaces=False
    )
    hf.chat_template = (f"{{# {of} #}}" if of else "") + USER_TEXT_TEMPLATE
    hf.save_pretrained(directory)
    return Tokenizer.load(str(directory))
