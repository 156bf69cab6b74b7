"""The tokenizer: a thin layer over the one that AutoTokenizer makes, which alone decides what text becomes which ids.

The one idea: a chat is rendered by the model's own chat template and by nothing else, and what ends a turn is found by asking that
template, not by knowing its family. The only transformers import in ptf.data.
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

from ptf.data.rendering import Rendering, with_arguments
from ptf.errors import UserError, refuse_custom_code

Message = Mapping[str, Any]

PROBES = (
    "Hello, world!", "  two  spaces\tand a tab", "\n\nnewlines\n", "naïve café Ångström ﬁ ①", "数学 русский العربية हिन्दी", "👩‍👩‍👧 emoji",
    "1234567.89e-10", "don't DON'T it's", "<|im_end|></s><|endoftext|>", "a\u0301 \u00e1", "x=  y;\r\n", "\u200b\ufeff",
)  # fmt: skip


# families of which AutoTokenizer takes a tokenizer_config.json at its word where it names no class of their own
PLAIN_FAMILIES = frozenset({None, "gemma3", "gemma3_text", "gpt_oss", "llama", "qwen3", "qwen3_moe"})
PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})


def loader(path: str) -> Any:
    """AutoTokenizer, or, where the directory's files leave it one choice, that choice: importing AutoTokenizer takes 2.7 CPU-seconds (it imports
    all of `transformers.generation`, scikit-learn and torch._dynamo), which every process of a run would pay."""
    directory = Path(path)
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        family = json.loads((directory / "config.json").read_text()).get("model_type") if (directory / "config.json").exists() else None
    except (OSError, ValueError):
        config, family = {}, None
    plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config and family in PLAIN_FAMILIES
    if plain and (directory / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


class Tokenizer:
    def __init__(self, hf: PreTrainedTokenizerBase, extra_stops: Sequence[int] = ()):
        """`extra_stops`: ids that also end an answer, from the model's generation_config.json."""
        self.hf: Any = hf  # its type hints are looser than what it does
        self._extra_stops = tuple(extra_stops)
        self.rendering = Rendering()

    @classmethod
    def load(cls, path: str, revision: str | None = None) -> "Tokenizer":
        """From a directory or a Hugging Face id; never from the network where HF_HUB_OFFLINE is set."""
        local = os.path.isdir(path) or os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")
        try:
            hf: Any = loader(path).from_pretrained(path, revision=revision, local_files_only=local, trust_remote_code=False)
        except Exception as e:  # of damaged files transformers and tokenizers raise a dozen kinds
            refuse_custom_code(path, e)
            why = next(iter(str(e).splitlines()), "") if isinstance(e, OSError | ValueError) else f"its files cannot be read: {type(e).__name__}: {e}"
            raise UserError(f"no tokenizer in {path}: {why}") from None
        try:
            stops = GenerationConfig.from_pretrained(path, revision=revision, local_files_only=local).eos_token_id  # type: ignore[arg-type]
        except OSError as e:
            if (file := Path(path) / "generation_config.json").is_file():
                raise UserError(f"{file} cannot be read, so it is not known what ends an answer: {next(iter(str(e).splitlines()), '')}") from None
            stops = None
        found = cls(hf, stops if isinstance(stops, list) else [] if stops is None else [stops])
        found.rendering = Rendering.read(path)
        return found

    def save(self, directory: str | Path) -> None:
        beside = Path(str(self.hf.name_or_path)) / "generation_config.json"  # says more than where to stop
        config = json.loads(beside.read_text()) if beside.is_file() else {}
        self.hf.save_pretrained(directory)
        if self._extra_stops:
            config = config if config.get("eos_token_id") else config | {"eos_token_id": list(self._extra_stops)}
            (Path(directory) / "generation_config.json").write_text(json.dumps(config))
        self.rendering.write(directory)

    def give_template(self, template: str | None, arguments: Mapping[str, Any]) -> None:
        """Put a chat template in the place of its own (None: keep that), with defaults for some of its arguments."""
        found = template if template is not None else self.hf.chat_template
        if arguments and not found:
            raise UserError("model.template_args: the tokenizer has no chat template to give them to; model.chat_template names one")
        if isinstance(found, dict):
            found = {name: with_arguments(text, arguments) for name, text in found.items()}
        elif found:
            found = with_arguments(found, arguments)
        self.hf.chat_template = found
        self._forget()

    def add(self, tokens: Sequence[str], special: bool = False) -> None:
        """Give each text an id of its own, in this order; what was derived from the vocabulary before is forgotten."""
        self.hf.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens], special_tokens=special)
        self._forget()

    def _forget(self) -> None:
        for name in ("_unknown", "_closings", "_text_arguments", "stop_ids", "cuts", "identity"):
            self.__dict__.pop(name, None)

    @property
    def vocab_size(self) -> int:
        """Ids in use; the model's embedding may have more rows."""
        return len(self.hf)

    @property
    def pad_id(self) -> int:
        """What fills the space behind a document. Masks go by position and never read it, so any id does where a tokenizer has none."""
        pad = self.hf.pad_token_id
        return pad if pad is not None else self.hf.eos_token_id or 0

    @cached_property
    def _unknown(self) -> int | None:
        """The id that stands for text which cannot be encoded; some tokenizers name a token here that means something else."""
        unk = self.hf.unk_token_id
        return None if unk in (self.hf.eos_token_id, self.hf.bos_token_id, self.hf.pad_token_id) else unk

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: nothing is put before or after it."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Of each text what `encode` gives; in one call, which costs less than one a text."""
        found = self.hf(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        for text, ids in zip(texts, found, strict=True):
            if self._unknown is not None and self._unknown in ids:
                raise UserError(f"the tokenizer cannot encode all of {text if len(text) < 200 else text[:200] + '…'!r}")
        return found

    def begin(self, text: str) -> list[int]:
        """Ids of a text that begins a document: behind the tokens that the tokenizer puts before one (`<s>`, or none), as servers encode a prompt."""
        ids, plain = self.hf(text, verbose=False)["input_ids"], self.encode(text)
        before = next((k for k in range(len(ids) - len(plain) + 1) if ids[k : k + len(plain)] == plain), None)
        if before is None:
            raise UserError(f"the tokenizer {self.template_name.split('#')[0]} encodes a text otherwise where it begins a document: {text[:60]!r}")
        return ids[: before + len(plain)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens included."""
        return self.hf.decode(np.asarray(ids, dtype=np.int64).tolist(), clean_up_tokenization_spaces=False)

    @property
    def template_name(self) -> str:
        """What errors call the chat template: where it came from and the start of its hash."""
        name = Path(str(self.hf.name_or_path)).name or "tokenizer"
        return f"{name}#{hashlib.sha256(str(self.hf.chat_template).encode()).hexdigest()[:8]}"

    def render_text(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Any] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as the chat template writes it, up to where the model would speak if `generation_prompt`. `arguments` are the template's,
        and come before the defaults that it may have."""
        if not self.hf.chat_template:
            raise UserError(f"the tokenizer {self.template_name.split('#')[0]} has no chat template: give model.tokenizer one that has, or model.chat_template")
        try:
            return self._rendered(_with_text(messages) if self._text_arguments else list(messages), generation_prompt, tools, arguments or {})
        except (TemplateError, TypeError, KeyError, IndexError) as e:
            raise UserError(f"chat template {self.template_name} refuses the messages: {e} (model.chat_template can name another template)") from None

    def _rendered(self, messages: Sequence[Message], prompt: bool, tools: Any, arguments: Mapping[str, Any]) -> str:
        given = {**self.rendering.arguments, **arguments}
        return self.hf.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **given)

    @cached_property
    def _text_arguments(self) -> bool:
        """Whether the template wants the arguments of calls as JSON text, which is what it is asked: it refuses them as objects only (DeepSeek-V3)."""
        for call in (_tool_call("1"), _with_text(_tool_call("1"))):
            try:
                self._rendered(call, False, None, {})
                return isinstance(call[-1]["tool_calls"][0]["function"]["arguments"], str)
            except (TemplateError, TypeError, KeyError, IndexError):
                continue
        return False

    def render(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Any] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The ids of `render_text`."""
        return self.encode(self.render_text(messages, generation_prompt, tools, arguments))

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: what the template writes after an assistant's turn (first) and after a tool call, then eos and the generation config's.
        Where it writes several special tokens there, the one that these name, else the last, for a server runs on to it."""
        known = [i for i in (self.hf.eos_token_id, *self._extra_stops) if i is not None]
        turn, call = (self._closings[kind].special for kind in ("answer", "call"))
        stops = [next((i for i in turn if i in known), turn[-1])] if turn else []
        stops += known
        if call and not set(call) & set(stops):
            stops.append(call[-1])
        return tuple(dict.fromkeys(stops))

    def closing(self, calls: bool) -> str:
        """What the template writes behind a turn only once the next message is there (GLM: its role's tag), up to the token at which a server stops;
        "" where a turn has an end of its own. `calls`: of a turn that calls tools, which their results follow."""
        return self._closings["call" if calls else "answer"].borrowed

    def follows(self, calls: bool) -> str:
        """What the template writes behind the stop of a conversation's last turn, whatever that says: a line break, an end of the document, or (Command-R)
        the next generation prompt."""
        last = self._closings["call" if calls else "answer"].last
        end = next((n for n, i in enumerate(last) if i in self.stop_ids), len(last))
        return self.decode(last[end + 1 :])

    @cached_property
    def _closings(self) -> dict[str, "_Closing"]:
        """Of an answer and of a tool call."""
        special = set(self.hf.all_special_ids) | {i for i, token in self.hf.added_tokens_decoder.items() if token.special}
        found = {}
        for kind, (build, then) in {"answer": (_answer, _USER), "call": (_tool_call, _RESULT)}.items():
            last, inside = self._ending(build), self._ending(lambda word, build=build, then=then: [*build(word), then])
            both = next((n for n, (a, b) in enumerate(zip(last, inside, strict=False)) if a != b), min(len(last), len(inside)))
            own = [i for i in last[:both] if i in special] or [i for i in last if i in special]
            borrowed = [i for i in inside if i in special][:1]
            if own or not borrowed:
                found[kind] = _Closing(own, last)
                continue
            told, more, stop = self._probe(build("1")), self._probe([*build("1"), then]), self.decode(borrowed)
            start = len(told) if more.startswith(told) else more.rindex(stop)
            found[kind] = _Closing(borrowed, last, more[start : more.index(stop, start) + len(stop)])
        return found

    def _probe(self, messages: Sequence[Message]) -> str:
        try:
            return self.render_text(messages, False)
        except UserError:  # some templates want a system message
            return self.render_text([{"role": "system", "content": "0"}, *messages], False)

    def _ending(self, build: Any) -> list[int]:
        """The ids that follow a turn whatever it says: two turns that differ, and what both end in."""
        if not self.hf.chat_template:
            return []
        try:
            a, b = (self.hf(self._probe(build(word)), add_special_tokens=False)["input_ids"] for word in ("1", "2"))
        except UserError:  # this template knows no such turn
            return []
        n = 0
        while a != b and a[-1 - n] == b[-1 - n]:
            n += 1
        return a[len(a) - n :]

    @cached_property
    def cuts(self) -> dict[str, int]:
        """The stop ids, by their text, that cut a text in two parts which are encoded independently: added tokens do, and the probes have to agree."""
        cuts = {self.decode([i]): i for i in self.stop_ids if i in self.hf.added_tokens_decoder}
        texts = [t for cut in cuts for a, b in zip(PROBES, PROBES[1:] + PROBES[:1], strict=True) for t in (a + cut + b, a + cut, cut + b)]
        ids = iter(self.hf(texts, add_special_tokens=False)["input_ids"] if texts else [])
        cut_ids = (i for i in cuts.values() for _ in PROBES)
        return (
            cuts if all(left[-1] == right[0] == i and whole == left[:-1] + right for i, whole, left, right in zip(cut_ids, ids, ids, ids, strict=True)) else {}
        )

    def fingerprint(self) -> str:
        """SHA-256 over what decides ids: see `identity`."""
        return self.identity["fingerprint"]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides ids, to be kept with whatever was made of them: SHA-256 of the vocabulary, merges, special tokens and chat template, the ids of
        probe strings (which catch a normalizer that was lost), and one `fingerprint` over all."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        said = json.loads(backend.to_str()) if backend is not None else {}
        model = said.get("model", {})
        steps = {name: said.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}
        facts = {
            "vocabulary": sorted(self.hf.get_vocab().items()), "merges": model.get("merges"),
            "special tokens": dict(sorted(self.hf.special_tokens_map.items())), "chat template": self.hf.chat_template,
            "steps": steps | {key: value for key, value in model.items() if key not in ("vocab", "merges")},  # from a text to pieces, and what joins them
        }  # fmt: skip
        found: dict[str, Any] = {name: _digest(fact) for name, fact in facts.items()}
        found["probes"] = [[text, self.hf(text, add_special_tokens=False)["input_ids"]] for text in PROBES]
        if self.rendering.facts:  # others keep their fingerprint
            found["rendering"] = self.rendering.facts
        return {"fingerprint": _digest(found), **found}

    def refuse_other_stops(self, stops: Sequence[int], what: str) -> None:
        """Raises UserError unless what ends an answer is what did in `what`."""
        if list(stops) != list(self.stop_ids):
            then, now = ([self.decode([i]) for i in ids] for ids in (stops, self.stop_ids))
            raise UserError(f"in {what} answers ended with {then}, now with {now}: the tokenizer's files or generation_config.json have changed; restore them")

    def refuse_other(self, identity: Mapping[str, Any], what: str) -> None:
        """Raises UserError, naming the first probe or part that differs, unless `what` was made with this tokenizer, whose identity it kept."""
        if identity.get("fingerprint") == self.fingerprint():
            return
        now = dict(self.identity["probes"])
        for text, ids in identity.get("probes", ()):
            if text in now and now[text] != ids:
                raise UserError(f"{what} was made with another tokenizer than the model's: of {text!r} that one made {ids}, this one {now[text]}")
        then, today = ((facts.get("rendering") or {}).get("date") for facts in (identity, self.identity))
        if then != today:
            raise UserError(f"{what} was made with a chat template that rendered the date {then}, not {today}: set data.date, or make it anew")
        names = dict.fromkeys((*identity, *self.identity))
        parts = [name for name in names if name not in ("fingerprint", "probes") and identity.get(name) != self.identity.get(name)]
        raise UserError(f"{what} was made with another tokenizer than the model's: they differ in their {' and '.join(parts)}")

    def class_trap(self) -> str | None:
        """How AutoTokenizer's class reads the directory's tokenizer.json otherwise than the file says (Phi-3's drops its normalizer), if it does. ptf
        trains on what AutoTokenizer makes, as servers do."""
        file = Path(str(self.hf.name_or_path)) / "tokenizer.json"
        if not file.is_file():
            return None
        backend = Backend.from_file(str(file))
        backend.no_truncation()
        for text, ids in self.identity["probes"]:
            if (plain := backend.encode(text, add_special_tokens=False).ids) != ids:
                found = f"{text!r} is {ids}, not {plain}"
                return f"AutoTokenizer makes a {type(self.hf).__name__} of {file.parent}, whose ids differ from its tokenizer.json's: {found}"
        return None


class _Closing(NamedTuple):
    """How a template closes a turn: the special ids, all that it writes behind the last turn, and what it writes only once the next message is there."""

    special: list[int]
    last: list[int]
    borrowed: str = ""


def _digest(fact: Any) -> str:
    return hashlib.sha256(json.dumps(fact, ensure_ascii=False, default=str).encode()).hexdigest()


def _answer(word: str) -> list[Message]:
    return [{"role": "user", "content": "1"}, {"role": "assistant", "content": word}]


def _tool_call(word: str) -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": word}}}
    return [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _with_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of their calls as JSON text."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}}

    return [{**m, "tool_calls": [written(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


_USER = {"role": "user", "content": "3"}
_RESULT = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "f"}
ROLES = ("system", "user", "assistant", "tool")
CHARACTER_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|><|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>' }}{% endif %}"
)


def character_tokenizer(alphabet: str, directory: str | Path) -> Tokenizer:
    """Write a tokenizer with one id a character, for tasks small enough for a CPU, as a directory for AutoTokenizer. `encode` refuses other characters."""
    special = ["<|pad|>", "<unk>", "<|im_start|>", "<|im_end|>", *(f"<|{role}|>" for role in ROLES)]
    vocab = {token: i for i, token in enumerate([*special, *sorted(set(alphabet))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", unk_token="<unk>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False,
        additional_special_tokens=[token for token in special if token not in ("<|pad|>", "<unk>", "<|im_end|>")],
    )  # fmt: skip
    hf.chat_template = CHARACTER_TEMPLATE
    hf.save_pretrained(directory)
    return Tokenizer.load(str(directory))


EVENT = "<[^<>]*>"  # the form of an event's token
PAD, UNKNOWN, END, START = "<pad>", "<unk>", "<end>", "<start>"
AS_IT_STANDS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"  # what was recommended is not what was done


def event_tokenizer(tokens: Iterable[str], directory: str | Path, of: str = "") -> Tokenizer:
    """Write a tokenizer of exactly these tokens (`<…>` each) as a directory for AutoTokenizer. Its chat template writes what users say as it stands,
    and nothing else; `of`, what the tokens stand for, is a comment in it, and so part of the fingerprint. Raises UserError for a token that is there
    twice or of another form."""
    vocabulary: dict[str, int] = {}
    for token in (PAD, UNKNOWN, END, START, *tokens):
        if token in vocabulary or not re.fullmatch(EVENT, token):
            raise UserError(f"the token {token!r} is {'there twice' if token in vocabulary else 'not of the form <…>'}")
        vocabulary[token] = len(vocabulary)
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(EVENT), "isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, clean_up_tokenization_spaces=False)
    hf.chat_template = (f"{{# {of} #}}" if of else "") + AS_IT_STANDS
    hf.save_pretrained(directory)
    return Tokenizer.load(str(directory))
