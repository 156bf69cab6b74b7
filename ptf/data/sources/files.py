"""Which files of a source are data: the files of one split and one format, and the names of all other files.

The choice follows from names alone (and from the few small files that list others: the README of a dataset,
`dataset_dict.json`, `state.json`), by the same rules for a directory, a bucket and a repository of the Hugging Face
Hub. An ambiguous choice is refused, never guessed.
"""

import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ptf import storage
from ptf.data.sources import hub
from ptf.errors import UserError

FORMATS = (
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json",
    ".csv",
    ".csv.gz",
    ".csv.zst",
    ".parquet",
    ".arrow",
    ".feather",
)
SPLITS = {  # a word in the name of a file or folder → its split, by the Hub's rules
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "val": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
DESCRIPTIONS = (  # never data; `bad_rows.jsonl` holds the rows set aside beside tokenized data
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    storage.MANIFEST,
    "bad_rows.jsonl",
)
SHOWN = 4  # names that a message lists


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files that are read, and those beside them that are not."""

    # URI → its size and a mark that changes with its content (ptf.storage.change_stamps), in the order they are read.
    stamps: Mapping[str, str]
    sizes: list[int]  # bytes of each file
    not_read: tuple[str, ...] = ()  # names below the location
    commit: str | None = None  # of a repository of the Hub


def resolve_files(location: str) -> DataFiles:
    """Return the data files of a location: a file, directory, glob, URI or dataset of the Hub, with or without
    `:config:split`.

    Raises UserError where there is none, or where a config, split or format must be chosen.
    """
    if (repo := hub.parse_location(location)) is not None:
        return _on_hub(repo)
    path, config, split = hub.without_names(location)
    below, stamps = storage.change_stamps(path)
    uris = {uri[len(below) :].lstrip("/"): uri for uri in stamps}
    if list(uris) == [posixpath.basename(path.rstrip("/"))] and not (config or split):
        chosen = [name for name in uris if format_of(name)]  # one file, whatever its name says of splits
    else:
        chosen = choose(sorted(uris), lambda name: storage.read_text(uris[name]), path, config, split)
    if not chosen:
        raise UserError(f"no {', '.join(FORMATS)} file in {path}")
    found = {uris[name]: stamps[uris[name]] for name in chosen}
    sizes = [int(stamp.split(" ")[0]) for stamp in found.values()]
    return DataFiles(found, sizes, tuple(sorted(uris.keys() - chosen)))


def _on_hub(repo: hub.Repo) -> DataFiles:
    commit = hub.commit_of(repo.id, repo.revision)
    tree = hub.tree(repo.id, commit)
    inside = [name for name in tree if not repo.inside or _matches(name, repo.inside)]

    def read(name):
        with hub.open_read(hub.uri(repo.id, commit, name)) as file:
            return file.read().decode()

    chosen = choose(inside, read, str(repo), repo.config, repo.split, folders_are_configs=not repo.inside)
    if not chosen:
        script = any(name.endswith(".py") for name in tree)
        raise UserError(
            f"{repo} has no {', '.join(FORMATS)} file"
            + (
                f", but a loading script, which is not run: {repo.id}@refs/convert/parquet is the Hub's own conversion"
                if script
                else ""
            )
        )
    uris = {hub.uri(repo.id, commit, name): f"{tree[name].size} {tree[name].oid}" for name in chosen}
    return DataFiles(uris, [tree[name].size for name in chosen], tuple(sorted(tree.keys() - chosen)), commit)


def format_of(name: str) -> str | None:
    """Return the suffix by which a file is read; None for a name that is not a data file's."""
    return next((suffix for suffix in FORMATS if name.endswith(suffix) and posixpath.basename(name) != suffix), None)


def choose(
    names: Sequence[str],
    read: Callable[[str], str],
    where: str,
    config: str | None = None,
    split: str | None = None,
    *,
    folders_are_configs: bool = False,
) -> list[str]:
    """Return the names (below one location, sorted) that are data, in that order.

    `read` returns the text of one of the named files. Raises UserError that lists the alternatives where a config or a
    split is missing or unknown, and where several formats remain.
    """
    data = [name for name in names if format_of(name) and not _never_data(name)]
    data = _without_unlisted(data, names, read, where)
    configs = _readme_configs(names, read, where)
    if configs:
        splits = _splits_of_config(_chosen_config(configs, config, where), data, where)
        chosen = _files_of_split(splits, data, split, where, named=True)
    else:
        data = _files_of_folder(data, config, where, folders_are_configs)
        dictionaries = [
            name
            for name in names
            if posixpath.basename(name) == "dataset_dict.json" and (config is None or name.startswith(f"{config}/"))
        ]
        splits = _saved_splits(dictionaries, data, read, where) or splits_of(data)
        chosen = _files_of_split(splits, data, split, where, named=False)
    formats: dict[str, list[str]] = {}
    for name in chosen:
        formats.setdefault(str(format_of(name)), []).append(name)
    if len(formats) > 1:
        counts = "; ".join(f"{len(files)} {suffix} ({shown(files)})" for suffix, files in sorted(formats.items()))
        folder = posixpath.join(re.split(r"[*?\[]", where)[0].rstrip("/"), posixpath.dirname(chosen[0]))
        raise UserError(
            f"{where} has files of several formats: {counts}. Choose one by a glob, such as "
            f"{posixpath.join(folder, f'*{format_of(chosen[0])}')}"
        )
    return chosen


def splits_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return split → names, by the Hub's rules: by folders that name a split, else by file names.

    Names without a split are left out.
    """
    names = list(names)
    by_folder = {
        name: split
        for name in names
        if (split := next((s for part in name.split("/")[:-1] if (s := _split_of_word(part))), None))
    }
    split_of = (
        by_folder
        if by_folder and not any(SHARD.match(posixpath.basename(name)) and _split_of_file(name) for name in names)
        else {name: split for name in names if (split := _split_of_file(name))}
    )
    splits: dict[str, list[str]] = {}
    for name, split in split_of.items():
        splits.setdefault(split, []).append(name)
    return splits


def _split_of_file(name: str) -> str | None:
    stem = posixpath.basename(name)[: -len(format_of(name) or "")]
    shard = SHARD.fullmatch(stem)  # train_sft-00000-of-00003: the split is train_sft
    word = _split_of_word(shard[1] if shard else stem)
    return word if not shard or word is None else (word if shard[1] in SPLITS else shard[1])


def _split_of_word(part: str) -> str | None:
    """Return the split that a part of a name stands for, or None."""
    return next((SPLITS[word] for word in re.split(r"[-._ 0-9]+", part) if word in SPLITS), None)


def _never_data(name: str) -> bool:
    """Return whether a name is never data.

    Such names are caches, descriptions, hidden files, and names that begin with an underscore, as Spark writes them.
    """
    base = posixpath.basename(name)
    hidden = any(part.startswith((".", "_")) for part in name.split("/"))
    return hidden or base in DESCRIPTIONS or (base.startswith("cache-") and base.endswith(".arrow"))


def _without_unlisted(data: list[str], names: Sequence[str], read: Callable[[str], str], where: str) -> list[str]:
    """Return the names without arrow files beside a `state.json` (of `save_to_disk`) that does not list them."""
    for state in (name for name in names if posixpath.basename(name) == "state.json"):
        folder = posixpath.dirname(state)
        beside = {name for name in data if posixpath.dirname(name) == folder and name.endswith(".arrow")}
        if not beside:
            continue
        try:
            files = {posixpath.join(folder, file["filename"]) for file in json.loads(read(state))["_data_files"]}
        except (ValueError, KeyError, TypeError):
            continue  # another program's file
        if missing := sorted(files - beside):
            raise UserError(f"{where}: {state} lists {shown(missing)}, which is not there: the copy is not complete")
        data = [name for name in data if name not in beside - files]
    return data


def _readme_configs(names: Sequence[str], read: Callable[[str], str], where: str) -> dict[str, dict[str, Any]]:
    """Return config → its entry in the README's header, where the header names data files."""
    if "README.md" not in names:
        return {}
    header = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", read("README.md").replace("\r\n", "\n"), re.DOTALL)
    try:
        about = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError as error:
        raise UserError(
            f"{where}: the header of README.md, which may name splits, is not YAML: {str(error).splitlines()[0]}"
        ) from None
    configs = about.get("configs") if isinstance(about, dict) else None
    entries = {str(entry.get("config_name", "default")): entry for entry in configs or [] if isinstance(entry, dict)}
    return entries if any("data_files" in entry or "data_dir" in entry for entry in entries.values()) else {}


def _chosen_config(configs: Mapping[str, dict[str, Any]], config: str | None, where: str) -> dict[str, Any]:
    """Return the entry of the config; raise UserError where it is unknown or must be chosen."""
    if config is not None and config not in configs:
        raise UserError(f"{where} has no config {config!r}; it has: {', '.join(sorted(configs))}")
    default = [
        name for name, entry in configs.items() if len(configs) == 1 or name == "default" or entry.get("default")
    ]
    if config is None and len(default) != 1:
        raise UserError(f"{where} has several configs: write {where}:CONFIG, one of {', '.join(sorted(configs))}")
    return configs[config or default[0]]


def _splits_of_config(config: Mapping[str, Any], data: Sequence[str], where: str) -> dict[str, list[str]]:
    """Return split → names of one config of a README."""
    folder = str(config.get("data_dir") or "").strip("/")
    within = [name for name in data if not folder or name.startswith(f"{folder}/")]
    patterns_by_split = config.get("data_files")
    if patterns_by_split is None:
        return splits_of(within) or {"train": within}
    entries = patterns_by_split if isinstance(patterns_by_split, list) else [patterns_by_split]
    wanted: dict[str, list[str]] = {}
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = entry.get("path")
        if paths is None:
            raise UserError(
                f"{where}: README.md lists data files in a form that is not known: {entry}; "
                "give a glob as the source's path"
            )
        wanted.setdefault(str(entry.get("split", "train")), []).extend(paths if isinstance(paths, list) else [paths])
    splits = {}
    for split, patterns in wanted.items():
        patterns = [posixpath.join(folder, str(pattern)) for pattern in patterns]
        splits[split] = [name for name in within if any(_matches(name, pattern) for pattern in patterns)]
    return {split: found for split, found in splits.items() if found}


def _files_of_folder(data: list[str], config: str | None, where: str, folders_are_configs: bool) -> list[str]:
    """Return the names of the config, which is a folder where no README says otherwise."""
    tops: dict[str, list[str]] = {}
    for name in data:
        tops.setdefault(name.split("/")[0] if "/" in name else "", []).append(name)
    if config is not None:
        if config not in tops:
            available = ", ".join(sorted(top for top in tops if top)) or "none"
            raise UserError(
                f"{where} has no config {config!r}: a config is a folder, and the folders with data are: {available}"
            )
        return tops[config]
    plain = "" not in tops and not any(_split_of_word(top) or "=" in top for top in tops)
    if (
        folders_are_configs
        and len(tops) > 1
        and plain
        and all(splits_of(name.split("/", 1)[1] for name in found) for found in tops.values())
    ):
        raise UserError(f"{where} has several configs: write {where}:CONFIG, one of {', '.join(sorted(tops))}")
    return data


def _saved_splits(
    dictionaries: Sequence[str], data: Sequence[str], read: Callable[[str], str], where: str
) -> dict[str, list[str]]:
    """Return split → names of a DatasetDict that was saved to disk."""
    if len(dictionaries) > 1:
        folders = [posixpath.dirname(name) for name in dictionaries]
        raise UserError(f"{where} holds several saved datasets: {shown(folders)}. Give the path of one")
    for dictionary in dictionaries:
        try:
            splits = [str(split) for split in json.loads(read(dictionary))["splits"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{where}: {dictionary} does not list the splits of a saved dataset") from None
        folders = {split: posixpath.join(posixpath.dirname(dictionary), split) + "/" for split in splits}
        return {split: [name for name in data if name.startswith(folder)] for split, folder in folders.items()}
    return {}


def _files_of_split(
    splits: Mapping[str, list[str]], data: list[str], split: str | None, where: str, *, named: bool
) -> list[str]:
    """Return the names of the split, or of splits joined by +.

    Where no split is given it returns all names, if there is no choice to make.
    """
    if split is not None:
        wanted = split.split("+")
        if unknown := [name for name in wanted if name not in splits]:
            available = (
                f"it has: {', '.join(splits)}"
                if splits
                else "its file names have no split, so name none, or give a glob as its path"
            )
            raise UserError(f"{where} has no split {', '.join(map(repr, unknown))}; {available}")
        chosen = {name for part in wanted for name in splits[part]}
        return [name for name in data if name in chosen]
    if len(splits) > 1:
        listing = "; ".join(f"{name} ({shown(found)})" for name, found in splits.items())
        raise UserError(
            f"{where} has several splits: {listing}. Write {where}::SPLIT, with a config {where}:CONFIG:SPLIT "
            "(`a+b` takes two splits), or give a glob as its path"
        )
    return next(iter(splits.values()), []) if named else data


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of a README, or the rest of a URI, names this file.

    A pattern that names a folder matches all files below it.
    """
    pattern = pattern.removeprefix("./").rstrip("/")
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = "".join(
        signs.get(part, part.replace("[!", "[^") if part.startswith("[") else re.escape(part)) for part in parts
    )
    return re.fullmatch(f"{text}(?:/.*)?", name) is not None


def shown(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def described(name: str, location: str, found: DataFiles) -> list[str]:
    """Return the lines on what is read of a source and what is not, for a run's first lines and `ptf inspect`."""
    where = (
        f"dataset {location} of the Hugging Face Hub at commit {found.commit}"
        if found.commit
        else f"{'directory' if os.path.isdir(hub.without_names(location)[0]) else 'path'} {location}"
    )
    lines = [
        (
            f"data: {name}: {where}: {len(found.stamps)} file{'s' * (len(found.stamps) != 1)}, "
            f"{sum(found.sizes) / 2**20:,.1f} MiB"
        )
    ]
    return lines + ([f"data: {name}: not read: {shown(found.not_read)}"] if found.not_read else [])
