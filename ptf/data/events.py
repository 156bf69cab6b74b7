"""The prepare plug for events: rows of who had what when become a catalogue, a tokenizer, histories to train on and histories to continue.

    data: {prepare: {use: "ptf.data.events:prepare", args: {events: events.csv.gz, items: items.csv.gz}}}

The one idea: all that training, generation and evaluation need is written at once, from the same split, so that nothing of what is held out is in any of
it but in the two files that say so.

What it writes:
    train.jsonl                        histories to train on (kind events)
    train_prompts.jsonl                the same to continue, with `history` and `future` (kind prompt)
    held_out.jsonl                     those of which a basket is held out (kind prompt)
    held_out_loss.jsonl                that basket, after its history as context (kind events)
    catalogue.json, vectors.npy        the items, and a row of unit length for each
    allowed.txt                        the items' tokens, for `rollout.allowed`
    tokens.jsonl, tokens.safetensors   for `model.tokens`: those tokens, and rows that begin near each other where items are alike
    items.safetensors                  for a head over the catalogue (ptf.recipes.next_item), where an item is one token: its id and its row
    model/                             a Qwen3 without weights, with a tokenizer of all other tokens
With `base`, a model of text: tokens.jsonl has descriptions and the tokens of gaps, the rows to train on are chats, and no model is written.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ptf.config.schema import TokensConfig
from ptf.data.added import add
from ptf.data.catalogue import Catalogue, Item
from ptf.data.histories import Split, absent, read, split, table
from ptf.data.item_vectors import item_vectors, spread
from ptf.data.semantic_ids import SemanticIds
from ptf.data.telling import DAY, GAPS, Telling
from ptf.data.tokenizer import START, Tokenizer, event_tokenizer
from ptf.errors import UserError

SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32", "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": True, "use_cache": True,
    "use_sliding_window": False, "bos_token_id": None,
}  # fmt: skip


def prepare(
    directory: str, *, events: str, items: str, columns: Mapping[str, str] = {}, item_columns: Mapping[str, str] = {}, unknown: str = "error",
    order: str = "error", hold_out: str | float = "last", ids: str | Mapping[str, Any] = "items", window: int = 512, gaps: bool = True,
    opening: float = 20.0, prompts: int = 4, model: Mapping[str, Any] = {}, base: str | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """`events`, `items`: csv, csv.gz, jsonl or parquet; `columns` of events: `user`, `time` (seconds), `item`; of items: `item`, `value`, `description`.
    `unknown`, `order`: see ptf.data.histories.read; `hold_out`: see its `split`. `ids`: `items`, a token for each, or `{levels: [64, 64]}`, semantic
    ids with so many codes a level. `window`: most tokens of a history. `opening`: what the first item of a basket counts, the others being 1.
    `prompts`: of each user, how many of the newest baskets that may be trained on become prompts to train on. `model`: sizes of the Qwen3. `base`: a
    model of text that is to learn the items beside what it knows; then `train.jsonl` and `held_out_loss.jsonl` are chats in which it answers a history with
    the next basket, those of `prompts`, and no model is written."""
    if base is not None and model:
        raise UserError("model: with base, its sizes are what they are; give one of the two")
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    facts = catalogue_rows(items, item_columns)
    histories = read(table(events), columns, facts, unknown=unknown, order=order)
    splits = {user: split(history, hold_out) for user, history in histories.by_user.items()}
    trained = [s.before for s in splits.values() if s.before]
    if not trained:
        raise UserError(f"{events}: with hold_out {hold_out!r} no user has a basket to train on")
    names = list(facts)
    place = {name: i for i, name in enumerate(names)}
    baskets = [[place[item] for item in basket.items] for history in trained for basket in history]
    width = int({**SIZES, **model}["hidden_size"])
    vectors = item_vectors(baskets, [facts[name].description for name in names], width, seed)
    if ids == "items":
        texts = tokens = [f"<i_{n}>" for n in range(len(names))]
        rows = vectors
    elif isinstance(ids, Mapping) and ids.keys() == {"levels"}:
        semantic = SemanticIds.fit(vectors, ids["levels"], seed)
        texts, tokens, rows = semantic.texts(vectors), semantic.tokens(), semantic.rows()
        semantic.save(root / "semantic_ids.npz")
    else:
        raise UserError(f"ids must be `items`, or `levels` with numbers of codes, not {ids!r}")
    had = Counter(item for history in trained for item in {item for basket in history for item in basket.items})
    stands_for = "items_" + hashlib.sha256(json.dumps([names, texts]).encode()).hexdigest()[:16]  # so that other items are another tokenizer
    between = [f"<gap_{n}>" for n in range(GAPS if gaps else 1)]
    if base is None:
        tokenizer = event_tokenizer(between, root / "model", stands_for)
        write_model(root / "model", tokenizer, window, model)
        save_file({"embed": spread(rows, width, seed)}, root / "tokens.safetensors")
    else:
        tokenizer, tokens = Tokenizer.load(base), [START, *between, *tokens, f"<{stands_for}>"]
    described = {text: facts[name].description for name, text in zip(names, texts, strict=True)} if base else {}
    lines(root / "tokens.jsonl", ({"token": token} | ({"description": described[token]} if described.get(token) else {}) for token in tokens))
    add(tokenizer, TokensConfig(file=str(root / "tokens.jsonl")))
    if ids == "items" and base is None:
        places = np.array([id_ for (id_,) in tokenizer.encode_all(texts)], np.int64)
        save_file({"ids": places, "rows": spread(rows, width, seed)}, root / "items.safetensors")
    found = [replace(facts[name], text=text, popularity=had[name] / len(trained)) for name, text in zip(names, texts, strict=True)]
    Catalogue(tuple(found), tokenizer.fingerprint()).save(str(root / "catalogue.json"))
    np.save(root / "vectors.npy", vectors.astype(np.float32))
    (root / "allowed.txt").write_text("".join(text + "\n" for text in texts))
    told = Telling({item.name: item for item in found}, window, gaps, opening)
    held = {user: s for user, s in splits.items() if s.before and s.future}
    lines(root / "held_out.jsonl", (told.prompt(user, s) for user, s in held.items()))
    earlier = [(user, Split(s.before[:n], s.before[n:])) for user, s in splits.items() for n in range(max(1, len(s.before) - prompts), len(s.before))]
    lines(root / "train_prompts.jsonl", (told.prompt(user, s) for user, s in earlier))
    if base is None:
        rows_written = lines(root / "train.jsonl", (row for s in splits.values() for row in told.windows(s.before)))
        lines(root / "held_out_loss.jsonl", (told.continued(s) for s in held.values()))
    else:
        rng = np.random.default_rng(seed)
        rows_written = lines(root / "train.jsonl", (told.chat(s, rng) for _, s in earlier))
        lines(root / "held_out_loss.jsonl", (told.chat(s, rng) for s in held.values()))
    if not rows_written:
        raise UserError(f"{events}: with hold_out {hold_out!r} nothing is left to train on: no user has two baskets, or two items, before what is held out")
    counts = histories.counts
    print(
        f"events: {counts['rows']} rows, {counts['duplicates']} twice in a basket, {counts['unknown']} of unknown items; {len(splits)} users, "
        f"{counts['single']} left out with one event; {len(names)} items; {len(held)} users have a basket held out; {told.left_out} baskets of one item after "
        "nothing are not trained", flush=True,
    )  # fmt: skip


def catalogue_rows(path: str, columns: Mapping[str, str]) -> dict[str, Item]:
    """Item → what is known of it, in the file's order."""
    found: dict[str, Item] = {}
    known = ("item", "value", "description")
    if unknown := columns.keys() - set(known):
        raise UserError(f"item_columns: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    name, value, description = (columns.get(key, key) for key in known)
    for number, (where, row) in enumerate(table(path), 1):
        here = f"{where}, item {number}"
        if missing := [there for there in columns.values() if there not in row]:
            raise UserError(f"{here}: there is no {', '.join(missing)}; this row has {sorted(row)}")
        if absent(row.get(name)):
            raise UserError(f"{here}: {name!r} names no item; this row has {dict(row)}")
        try:
            worth = float(row[value]) if value in row else 1.0
        except (ValueError, TypeError):
            worth = math.nan
        if not 0 <= worth < math.inf:
            raise UserError(f"{here}: {value} must be a number of at least 0, not {row[value]!r}")
        item = Item(str(row[name]), "", worth, description="" if absent(row.get(description)) else str(row[description]))
        if item.name in found:
            raise UserError(f"{here}: {item.name!r} is there twice")
        found[item.name] = item
    if not found:
        raise UserError(f"{path}: there are no items")
    return found


def lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write them; how many."""
    count = 0
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def write_model(directory: Path, tokenizer: Any, window: int, sizes: Mapping[str, Any]) -> None:
    """A Qwen3's config.json; `sizes` are keys of it."""
    ids = {"eos_token_id": tokenizer.stop_ids[0], "pad_token_id": tokenizer.pad_id}
    config = {"vocab_size": -(-tokenizer.vocab_size // 8) * 8, "max_position_embeddings": 2 * window, **ids, **SIZES}
    if unknown := sizes.keys() - config.keys():
        raise UserError(f"model: {', '.join(sorted(unknown))} is no key of its config.json; there are {', '.join(config)}")
    (directory / "config.json").write_text(json.dumps(config | dict(sizes), indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")


def generated(
    directory: str, *, users: int = 200, items: int = 120, kinds: int = 6, seed: int = 0, **knobs: Any
) -> None:  # fmt: skip
    """Users who like one kind of items, come back for what they had, and now and then try something new of their kind; then `prepare`."""
    rng, root = np.random.default_rng(seed), Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    words = ["red", "blue", "green", "old", "new", "small", "large", "round"]
    kind = np.arange(items) % kinds
    rows = [{"item": f"item{n}", "value": round(float(rng.lognormal(1, 1)), 2), "description": f"{words[n % 8]} thing{kind[n]}"} for n in range(items)]
    lines(root / "items.jsonl", rows)
    events = []
    for user in range(users):
        mine, had, time = rng.integers(kinds), list[int](), float(rng.integers(0, 100)) * DAY
        for _ in range(int(rng.integers(2, 8))):
            fresh = rng.choice(np.flatnonzero(kind == mine), size=min(3, items // kinds), replace=False).tolist()
            again = rng.choice(had, size=min(2, len(had)), replace=False).tolist() if had else []
            for item in dict.fromkeys([*again, *fresh]):
                events.append({"user": f"u{user}", "time": time, "item": f"item{item}"})
                had.append(int(item))
            time += float(rng.integers(1, 60)) * DAY
    lines(root / "events.jsonl", events)
    prepare(directory, events=str(root / "events.jsonl"), items=str(root / "items.jsonl"), seed=seed, **knobs)
