"""The prepare plugin for events: writes a catalogue, a tokenizer, histories to train on and histories to continue.

    data: {prepare: {use: "ptf.events.prepare:prepare", args: {events: events.csv.gz, items: items.csv.gz}}}

All that training, generation and evaluation need is written at once, from the same split, so that only the two files of
held-out baskets contain anything of what is held out.

The files that it writes:
    train.jsonl                        histories to train on (kind events)
    train_prompts.jsonl                the same histories to continue, with `history` and `future` (kind prompt)
    held_out.jsonl                     histories of which a basket is held out (kind prompt)
    held_out_loss.jsonl                that basket, after its history as context (kind events)
    catalogue.json, vectors.npy        the items, and a row of unit length for each
    histories.jsonl                    the histories that may be trained on, with times: baselines are fitted on them
    allowed.txt                        the items' tokens, for `rollout.constrained_decoding`
    tokens.jsonl, tokens.safetensors   for `model.tokens`: those tokens, and initial rows that are close to each other
                                       where items are alike
    items.safetensors                  for a head over the catalogue (ptf.events.item_head), where an item is one
                                       token: its id and its row
    model/                             a Qwen3 without weights, with a tokenizer of all other tokens
With `base`, a text model that is to learn the items, tokens.jsonl also has the items' descriptions and the gap tokens,
the rows of train.jsonl and held_out_loss.jsonl are chats, and model/, tokens.safetensors and items.safetensors are not
written.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from ptf.config.sections.model import TokensConfig
from ptf.data.added import add
from ptf.data.event_tokenizer import event_tokenizer
from ptf.data.event_tokens import START
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue, Item
from ptf.events.histories import Basket, History, Split, absent, number_in, read, save, split, table
from ptf.events.item_vectors import item_vectors, rotate_to_width
from ptf.events.semantic_ids import SemanticIds
from ptf.events.serialize import DAY, GAPS, HistorySerializer, days_of

SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "bos_token_id": None,
}


def prepare(
    directory: str,
    *,
    events: str,
    items: str,
    columns: Mapping[str, str] = {},
    item_columns: Mapping[str, str] = {},
    unknown: str = "error",
    order: str = "error",
    hold_out: str | float = "last",
    ids: str | Mapping[str, Any] = "items",
    window: int = 512,
    gaps: bool = True,
    request_time: bool = False,
    inside: float = 0.05,
    prompts: int = 4,
    model: Mapping[str, Any] = {},
    base: str | None = None,
    seed: int = 0,
) -> None:
    """Write everything that training, generation and evaluation on events need into a directory.

    `events`, `items`, `columns`, `item_columns`, `unknown`, `order`, `hold_out`: see `read_events`.
    `ids`: `items`, one token for each item, or `{levels: [64, 64]}`, semantic ids with so many codes per level.
    `window`: most tokens of a history. `request_time`: the model is told when the next basket happens, see
    ptf.events.serialize. `inside`: the weight of every token but the first items of baskets, which
    have weight 1; with 0, the model learns only how a basket begins.
    `prompts`: number of each user's newest baskets, of those that may be trained on, that become prompts to train on.
    `model`: sizes of the Qwen3. `base`: a text model that is to learn the items; no other model is then written, and
    `train.jsonl` and `held_out_loss.jsonl` hold chats, in which the model answers a history with the next basket.
    `train.jsonl` then has one chat for each prompt. Raises UserError for invalid arguments or rows.
    """
    if base is not None and model:
        raise UserError("model: a model that `base` names has its own sizes; give `base` or `model`, not both")
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    facts, splits, counts = read_events(
        events, items, columns=columns, item_columns=item_columns, unknown=unknown, order=order, hold_out=hold_out
    )
    trained = [s.before for s in splits.values() if s.before]
    if not trained:
        raise UserError(f"{events}: with hold_out {hold_out!r} no user has a basket to train on")
    index_of = {name: i for i, name in enumerate(facts)}
    baskets = [[index_of[item] for item in basket.items] for history in trained for basket in history]
    width = int({**SIZES, **model}["hidden_size"])
    vectors = item_vectors(baskets, [item.description for item in facts.values()], width, seed)
    item_tokens = _item_tokens(root, ids, vectors, seed)
    tokenizer = _write_tokens(root, facts, item_tokens, base, GAPS if gaps else 1, window, model, width, seed)
    if ids == "items" and base is None:
        token_ids = np.array(tokenizer.encode_all(item_tokens.texts), np.int64)[:, 0]
        rows = rotate_to_width(item_tokens.rows, width, seed)
        days = [(tokenizer.encode(f"<gap_{n}>")[0], days_of(n)) for n in range(GAPS if gaps else 1)]
        sold = np.bincount([item for basket in baskets for item in basket], minlength=len(facts))
        tensors = {"ids": token_ids, "rows": rows, "sold": sold, "gaps": np.array(days, np.float32)}
        save_file(tensors | {"request_time": np.array(request_time)}, root / "items.safetensors")
    catalogue = _write_catalogue(root, facts, item_tokens, trained, tokenizer)
    save(str(root / "histories.jsonl"), {user: s.before for user, s in splits.items() if s.before})
    np.save(root / "vectors.npy", vectors.astype(np.float32))
    serializer = HistorySerializer({item.name: item for item in catalogue}, window, gaps, inside, request_time)
    held_out = {user: s for user, s in splits.items() if s.before and s.future}
    if not _write_histories(root, serializer, splits, held_out, prompts, None if base is None else seed):
        raise UserError(
            f"{events}: with hold_out {hold_out!r} nothing is left to train on: no user has two baskets, "
            "or two items, before what is held out"
        )
    print(_summary(counts, len(splits), len(facts), len(held_out), serializer.left_out), flush=True)


def read_events(
    events: str,
    items: str,
    *,
    columns: Mapping[str, str] = {},
    item_columns: Mapping[str, str] = {},
    unknown: str = "error",
    order: str = "error",
    hold_out: str | float = "last",
) -> tuple[dict[str, Item], dict[str, Split], dict[str, int]]:
    """Return the items by name, the split history of each user, and counts of rows, from files of events and of items.

    The files are csv, jsonl or parquet. `columns` of events: `user`, `time` (seconds), `item`, and `value` where each
    event has a price; of items: `item`, `value`, `description`. `unknown`, `order`: see ptf.events.histories.read;
    `hold_out`: see its `split`. With a time, the items are those that were known then. An item without an earlier event
    is left out, and so are its held-out events (counted as `later`). An item's value is the median of its earlier
    prices; without prices, it stays that of the items' file, which may contain what happened later.
    """
    facts = catalogue_rows(items, item_columns)
    date = -math.inf if isinstance(hold_out, str) else hold_out
    histories = read(table(events), columns, facts, unknown=unknown, order=order, date=date)
    splits = {user: split(history, hold_out) for user, history in histories.by_user.items()}
    counts = {**histories.counts, "later": 0}
    if isinstance(hold_out, str):
        return facts, splits, counts
    known = {
        name: replace(item, value=median(prices) if prices else item.value)
        for name, item in facts.items()
        if (prices := histories.prices.get(name)) is not None
    }
    for user, s in splits.items():
        future = [Basket(basket.time, tuple(i for i in basket.items if i in known)) for basket in s.future]
        counts["later"] += sum(len(basket.items) for basket in s.future) - sum(len(basket.items) for basket in future)
        splits[user] = Split(s.before, tuple(basket for basket in future if basket.items))
    return known, splits, counts


def _summary(counts: Mapping[str, int], users: int, items: int, held_out: int, left_out: int) -> str:
    """Return a line on what was read; `counts` are those of the histories."""
    return (
        f"events: {counts['rows']} rows, {counts['duplicates']} twice in a basket, "
        f"{counts['unknown']} of unknown items; {users} users, "
        f"{counts['single']} left out with one event; {items} items; "
        f"{held_out} users have a basket held out; "
        f"{counts['later']} held-out events of items that were first bought later are dropped; "
        f"{left_out} baskets of one item without a basket before them are not trained"
    )


class _ItemTokens(NamedTuple):
    """How a catalogue's items are written as tokens."""

    texts: list[str]  # of each item, its tokens joined
    tokens: list[str]  # all tokens that items consist of
    rows: np.ndarray  # [tokens, d]: initial embeddings of the tokens


def _item_tokens(root: Path, ids: str | Mapping[str, Any], vectors: np.ndarray, seed: int) -> _ItemTokens:
    """Return the tokens of the items; semantic ids are saved in `root`. Raises UserError for unknown `ids`."""
    if ids == "items":
        tokens = [f"<i_{n}>" for n in range(len(vectors))]
        return _ItemTokens(tokens, tokens, vectors)
    if isinstance(ids, Mapping) and ids.keys() == {"levels"}:
        semantic = SemanticIds.fit(vectors, ids["levels"], seed)
        texts = semantic.texts(vectors)
        semantic.save(root / "semantic_ids.npz")
        return _ItemTokens(texts, semantic.tokens(), semantic.rows())
    raise UserError(f"ids must be `items`, or `levels` with numbers of codes, not {ids!r}")


def _write_tokens(
    root: Path,
    facts: Mapping[str, Item],
    item_tokens: _ItemTokens,
    base: str | None,
    gaps: int,
    window: int,
    model: Mapping[str, Any],
    width: int,
    seed: int,
) -> Tokenizer:
    """Write the tokens of the items, and without `base` a model; return the tokenizer with all tokens."""
    texts, tokens = item_tokens.texts, item_tokens.tokens
    # A hash of the items makes the tokenizer of other items a different one.
    stands_for = "items_" + hashlib.sha256(json.dumps([list(facts), texts]).encode()).hexdigest()[:16]
    gap_tokens = [f"<gap_{n}>" for n in range(gaps)]
    descriptions: dict[str, str] = {}
    if base is None:
        tokenizer = event_tokenizer(gap_tokens, root / "model", stands_for)
        write_model(root / "model", tokenizer, window, model)
        save_file({"embed": rotate_to_width(item_tokens.rows, width, seed)}, root / "tokens.safetensors")
    else:
        tokenizer = Tokenizer.load(base)
        tokens = [START, *gap_tokens, *tokens, f"<{stands_for}>"]
        descriptions = {text: item.description for item, text in zip(facts.values(), texts, strict=True)}
    write_lines(
        root / "tokens.jsonl",
        (
            {"token": token} | ({"description": descriptions[token]} if descriptions.get(token) else {})
            for token in tokens
        ),
    )
    add(tokenizer, TokensConfig(file=str(root / "tokens.jsonl")))
    return tokenizer


def _write_catalogue(
    root: Path, facts: Mapping[str, Item], item_tokens: _ItemTokens, trained: Sequence[History], tokenizer: Tokenizer
) -> list[Item]:
    """Write the catalogue and the allowed responses; return the items, whose popularity is that in `trained`."""
    users_of = Counter(item for history in trained for item in {item for basket in history for item in basket.items})
    items = [
        replace(facts[name], text=text, popularity=users_of[name] / len(trained))
        for name, text in zip(facts, item_tokens.texts, strict=True)
    ]
    Catalogue(tuple(items), tokenizer.identity["fingerprint"]).save(str(root / "catalogue.json"))
    (root / "allowed.txt").write_text("".join(text + "\n" for text in item_tokens.texts))
    return items


def _write_histories(
    root: Path,
    serializer: HistorySerializer,
    splits: Mapping[str, Split],
    held_out: Mapping[str, Split],
    prompts: int,
    chat_seed: int | None,
) -> bool:
    """Write the rows to train on, to continue and to evaluate; return whether there are rows to train on.

    With `chat_seed`, which seeds the order of items inside a basket, the rows are chats.
    """
    write_lines(root / "held_out.jsonl", (serializer.prompt(user, s) for user, s in held_out.items()))
    earlier = [
        (user, Split(s.before[:n], s.before[n:]))
        for user, s in splits.items()
        for n in range(max(1, len(s.before) - prompts), len(s.before))
    ]
    write_lines(root / "train_prompts.jsonl", (serializer.prompt(user, s) for user, s in earlier))
    if chat_seed is None:
        rows = (row for s in splits.values() for row in serializer.windows(s.before))
        last = (serializer.held_out_row(s) for s in held_out.values())
    else:
        rng = np.random.default_rng(chat_seed)
        rows = (serializer.chat(s, rng) for _, s in earlier)
        last = (serializer.chat(s, rng) for s in held_out.values())
    has_rows = write_lines(root / "train.jsonl", rows)  # first: both draw from the generator
    write_lines(root / "held_out_loss.jsonl", last)
    return has_rows


def catalogue_rows(path: str, columns: Mapping[str, str]) -> dict[str, Item]:
    """Return the items of a file by name, in its order. Raises UserError that names an invalid row."""
    facts: dict[str, Item] = {}
    known = ("item", "value", "description")
    if unknown := columns.keys() - set(known):
        raise UserError(f"item_columns: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    name, value, description = (columns.get(key, key) for key in known)
    for number, (where, row) in enumerate(table(path), 1):
        here = f"{where}, item {number}"
        if missing := [column for column in columns.values() if column not in row]:
            raise UserError(f"{here}: the column {', '.join(missing)} is missing; this row has {sorted(row)}")
        if absent(row.get(name)):
            raise UserError(f"{here}: the column {name!r} is empty; this row has {dict(row)}")
        worth = number_in(row[value]) if value in row else 1.0
        if not 0 <= worth < math.inf:
            raise UserError(f"{here}: {value} must be a number of at least 0, not {row[value]!r}")
        key, text = str(row[name]), "" if absent(row.get(description)) else str(row[description])
        if key in facts:
            raise UserError(f"{here}: {key!r} is listed twice")
        facts[key] = Item(key, "", worth, description=text)
    return facts


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Write rows as jsonl; return whether there are any."""
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        return file.tell() > 0


def write_model(directory: Path, tokenizer: Any, window: int, sizes: Mapping[str, Any]) -> None:
    """Write a Qwen3's config.json, in which `sizes` replaces keys, and its generation_config.json."""
    ids = {"eos_token_id": tokenizer.stop_ids[0], "pad_token_id": tokenizer.pad_id}
    config = {"vocab_size": -(-tokenizer.vocab_size // 8) * 8, "max_position_embeddings": 2 * window, **ids, **SIZES}
    if unknown := sizes.keys() - config.keys():
        raise UserError(
            f"model: {', '.join(sorted(unknown))} is no key of its config.json; the keys are {', '.join(config)}"
        )
    (directory / "config.json").write_text(json.dumps(config | dict(sizes), indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")


def generated(
    directory: str, *, users: int = 200, items: int = 120, kinds: int = 6, seed: int = 0, **arguments: Any
) -> None:
    """Generate events and items, and `prepare` them; `arguments` are further ones of `prepare`.

    Each user likes one kind of items, buys items again, and now and then tries a new one of that kind.
    """
    rng, root = np.random.default_rng(seed), Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    words = ["red", "blue", "green", "old", "new", "small", "large", "round"]
    kind = np.arange(items) % kinds
    rows = [
        {
            "item": f"item{n}",
            "value": round(float(rng.lognormal(1, 1)), 2),
            "description": f"{words[n % 8]} thing{kind[n]}",
        }
        for n in range(items)
    ]
    write_lines(root / "items.jsonl", rows)
    events = []
    for user in range(users):
        liked_kind, had = rng.integers(kinds), list[int]()
        time = float(rng.integers(0, 100)) * DAY
        for _ in range(int(rng.integers(2, 8))):
            new = rng.choice(np.flatnonzero(kind == liked_kind), size=min(3, items // kinds), replace=False).tolist()
            repeated = rng.choice(had, size=min(2, len(had)), replace=False).tolist() if had else []
            for item in dict.fromkeys([*repeated, *new]):
                events.append({"user": f"u{user}", "time": time, "item": f"item{item}"})
                had.append(int(item))
            time += float(rng.integers(1, 60)) * DAY
    write_lines(root / "events.jsonl", events)
    prepare(directory, events=str(root / "events.jsonl"), items=str(root / "items.jsonl"), seed=seed, **arguments)
