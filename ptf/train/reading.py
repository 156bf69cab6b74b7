"""What a run reads: its sources as lanes of packed rows, and its validation sets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.compute.peers import peers
from ptf.compute.world import World
from ptf.config import Job
from ptf.data.exchange import group_size
from ptf.data.forms import Row
from ptf.data.kinds import unread
from ptf.data.loader import Loader
from ptf.data.packing import pack_all
from ptf.data.passes import Planned, is_few, planned
from ptf.data.pipeline import Lanes, atoms_once, opened
from ptf.data.quarantine import Quarantine
from ptf.data.sample import Atom
from ptf.data.sources import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.recipes.protocol import Recipe


def specs(sources: Any, epochs: int | None = None, verify_up_to: float = float("inf")) -> dict[str, SourceSpec]:
    """The config's sources as plain values; `epochs` is for those that have none of their own."""
    return {
        name: SourceSpec(
            s.path, s.weight, s.kind, s.columns, s.limit, s.epochs or epochs, s.rows, s.config, s.split, s.revision, verify_up_to=verify_up_to,
        )
        for name, s in sources.items()
    }  # fmt: skip


def make_lanes(job: Job, recipe: Recipe, tokenizer: Tokenizer, run: Path | None = None) -> Lanes:
    """`run` is where rows that are set aside are kept."""
    data = job.data
    return Lanes(
        specs(data.sources, job.train.epochs, job.verify_bytes), tokenizer, lambda row, source: recipe.encode(row, tokenizer, source),
        lanes=data.lanes, seed=job.seed,
        shuffle=data.shuffle, seq_len=data.seq_len, lookahead=data.lookahead, too_long=data.too_long, temperature=data.mix.temperature, by=data.mix.by,
        exhausted=data.mix.exhausted, reorder=data.baskets == "shuffle", share=data.share_beginnings,
        quarantine=str(run / "quarantine") if run and data.on_bad_row == "skip" else None, max_bad=data.max_bad,
    )  # fmt: skip


def make_loader(job: Job, lanes: Lanes, world: World) -> Loader:
    """All ranks call it together."""
    data = job.data
    if world.leads:
        for line in unread_columns(specs(data.sources)):
            print(f"train: {line}", flush=True)
    return Loader(
        lanes, lanes=data.lanes, rows=job.train.rows, rank=world.data_rank, world_size=world.data_size,
        micro_rows=1 if job.train.deterministic else job.train.micro_rows, seq_len=data.seq_len, prefetch=data.prefetch, timeout_s=job.compute.timeout_s,
        peers=peers(world, group_size(world.data_size), job.compute.timeout_s),
    )  # fmt: skip


def planned_steps(job: Job, lanes: Lanes, loader: Loader, world: World) -> Planned:
    """What the whole run takes, of all ranks together. The steps of a run that ends with its data are always exact."""
    few = is_few(lanes)
    if world.leads and (few or not lanes.endless):
        print("train: counting the steps and passes that the data has", flush=True)
    total = lambda values: world.sum(values).tolist()  # noqa: E731
    found = planned(lanes, job.train.rows, job.train.steps, served=loader.served, total=total, most=world.max, exact=few or not lanes.endless)
    if not found.steps[1]:
        raise UserError("the data has no sample to train on")
    return found


def held_out_rows(job: Job, recipe: Recipe, tokenizer: Tokenizer, quarantine: Path | None = None) -> dict[str, list[list[Atom]]]:
    """The validation sets, packed. `quarantine`: a directory for their bad rows, where they are skipped; without it they are only counted."""
    data, found = job.data, {}

    def encode(row: Row, source: str) -> list[Atom]:
        return recipe.encode(row, tokenizer, source)

    for name, spec in specs(data.validation, None, job.verify_bytes).items():
        file = quarantine / f"validation-{name}.jsonl" if quarantine else None
        aside = Quarantine(file, data.max_bad).add if data.on_bad_row == "skip" else None
        atoms = atoms_once({name: spec}, tokenizer=tokenizer, encode=encode, seq_len=data.seq_len, too_long=data.too_long, set_aside=aside)
        found[name] = pack_all(atoms, data.seq_len)
    return found


def unread_columns(sources: Mapping[str, SourceSpec]) -> list[str]:
    """A line for each source that has columns which nothing reads."""
    found = {name: unread(spec, reader) for name, (reader, spec) in ((n, opened(s, None)) for n, s in sources.items() if s.kind != "tokenized")}
    return [f"source {name}: columns that nothing reads: {', '.join(columns)}" for name, columns in found.items() if columns]
