"""Keys of a config that have another name today, and plugins that stand in another module.

There is one table, and three read it. A config with an old name is refused with the new one (`ptf.config.tree`), `ptf
upgrade` rewrites it (`ptf.config.upgrade`), and what an earlier version of ptf has stored is translated when it is
read, so that its runs continue. Fingerprints are taken over the first names, so that they do not depend on the version.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

# dotted, NAME for a name of the user's own; a key stays in its section
KEYS = {
    "compute.pools.NAME.park": "compute.pools.NAME.offload",
    "data.lanes": "data.partitions",
    "data.share_beginnings": "data.share_prefixes",
    "rollout.equal": "rollout.zero_variance_groups",
    "rollout.gpu_share": "rollout.gpu_memory_utilization",
    "rollout.group": "rollout.group_size",
    "train.checkpointing": "train.activation_checkpointing",
    "train.decay_at": "train.decay_at_loss",
    "train.micro_rows": "train.micro_sequences",
    "train.rows": "train.sequences",
    "train.stop": "train.early_stopping",
}
# of what a config may name as `use: module:name`
MODULES = {
    "ptf.data.events": "ptf.events.prepare",
    "ptf.data.item_vectors": "ptf.events.item_vectors",
    "ptf.data.ranking": "ptf.events.ranking_metrics",
    "ptf.data.semantic_ids": "ptf.events.semantic_ids",
    "ptf.model.declared": "ptf.model.custom_head",
    "ptf.recipes.dpo": "ptf.recipes.dpo.recipe",
    "ptf.recipes.grpo": "ptf.recipes.grpo.recipe",
    "ptf.recipes.kd": "ptf.recipes.kd.recipe",
    "ptf.recipes.next_item": "ptf.events.item_head",
    "ptf.recipes.opd": "ptf.recipes.opd.recipe",
    "ptf.recipes.ppo": "ptf.recipes.ppo.recipe",
    "ptf.recipes.rm": "ptf.recipes.rm.recipe",
    "ptf.recipes.sft": "ptf.recipes.sft.recipe",
    "ptf.rl.at_once": "ptf.rl.rewards.concurrent",
    "ptf.rl.env": "ptf.rl.environments.protocol",
    "ptf.rl.native_engine": "ptf.rl.engines.native",
    "ptf.rl.ranking": "ptf.events.model_ranking",
    "ptf.rl.reward_model": "ptf.rl.rewards.model",
    "ptf.rl.sandbox": "ptf.rl.rewards.sandbox",
    "ptf.rl.vllm_engine": "ptf.rl.engines.vllm_engine",
}
FIRST_KEYS = {new: old for old, new in KEYS.items()}
FIRST_MODULES = {new: old for old, new in MODULES.items()}
# Comment at the end of a job.yaml that a run has written, before its digest. Such a file is translated, not refused.
SEAL = "# SHA-256 of the lineage and of what is above: "


class Rename(NamedTuple):
    """One name in the values of a config, and the name that takes its place."""

    path: tuple[str | int, ...]  # of the key or of the address, from the top of the values
    key: str  # the same, dotted; a trial of a sweep has keys of its own
    old: str  # the name as it is: a dotted key or an address
    new: str
    text: str  # what stands in the text instead: the key itself, without its section, or the address
    of_key: bool


def outdated(values: Any) -> list[Rename]:
    """Every old name in the values of a config, from the top down."""
    return list(_renames(values, KEYS, MODULES, (), ()))


def address(use: str, modules: Mapping[str, str] = MODULES) -> str | None:
    """Where `module:name` is today; None if it has not moved."""
    module, colon, name = use.partition(":")
    return f"{modules[module]}:{name}" if colon and module in modules else None


def with_first_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values under the names that keys and modules had first, for fingerprints.

    The values are changed in place.
    """
    return renamed(values, list(_renames(values, FIRST_KEYS, FIRST_MODULES, (), ())))


def renamed(values: Any, renames: Sequence[Rename]) -> Any:
    """Return the values (which are changed in place) with the new names.

    `renames` are all of theirs, from the top down.
    """
    for rename in reversed(renames):
        holder, name = holder_of(values, rename), rename.path[-1]
        if rename.of_key:
            holder[rename.text] = holder.pop(name)
        else:
            holder[name] = rename.text
    return values


def holder_of(values: Any, rename: Rename) -> Any:
    """Return the section that has the name."""
    return reduce(lambda inner, step: inner[step], rename.path[:-1], values)


def first_key(key: str) -> str:
    """Return the name that a dotted key had first."""
    return ".".join(_renamed((), key.split("."), FIRST_KEYS))


def _renames(
    value: Any, keys: Mapping[str, str], modules: Mapping[str, str], path: tuple[str | int, ...], at: tuple[str, ...]
) -> Iterator[Rename]:
    """`at` is where the value stands in a job: `path`, but in a sweep's trial, whose dotted keys begin at the top."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            below = () if at == ("flow", "sweep") else (*at, str(number))
            yield from _renames(inner, keys, modules, (*path, number), below)
    elif isinstance(value, dict):
        for name, inner in value.items():
            steps = name.split(".") if path and not at else [name]
            now = _renamed(at, steps, keys)
            old, new, here = ".".join((*at, *steps)), ".".join((*at, *now)), (*path, name)
            if now != steps:
                yield Rename(here, old, old, new, ".".join(now), True)
            if steps[-1] == "use" and isinstance(inner, str) and (moved := address(inner, modules)):
                yield Rename(here, old, inner, moved, moved, False)
            yield from _renames(inner, keys, modules, here, (*at, *steps))


def _renamed(at: tuple[str, ...], steps: list[str], keys: Mapping[str, str]) -> list[str]:
    """Return the steps of a key below `at`, each under its other name."""
    return [_last((*at, *steps[: i + 1]), keys) for i in range(len(steps))]


def _last(key: tuple[str, ...], keys: Mapping[str, str]) -> str:
    for old, new in keys.items():
        if not old.endswith(f".{key[-1]}"):
            continue
        pattern = old.split(".")
        if len(pattern) == len(key) and all(
            step in (key_part, "NAME") for step, key_part in zip(pattern, key, strict=True)
        ):
            return new.rpartition(".")[2]
    return key[-1]
