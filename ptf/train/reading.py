"""What a run reads: its sources as lanes of packed rows, and its validation sets."""

from pathlib import Path
from typing import Any

from ptf.compute.world import World
from ptf.config import Job
from ptf.data.loader import Loader
from ptf.data.packing import pack_all
from ptf.data.pipeline import Lanes, atoms_once
from ptf.data.sample import Atom
from ptf.data.sources import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.recipes import Recipe


def specs(sources: Any, epochs: int | None = None, verify_up_to: float = float("inf")) -> dict[str, SourceSpec]:
    """The config's sources as plain values; `epochs` is for those that have none of their own."""
    return {name: SourceSpec(s.path, s.weight, s.kind, s.columns, s.limit, s.epochs or epochs, verify_up_to) for name, s in sources.items()}


def make_loader(job: Job, recipe: Recipe, tokenizer: Tokenizer, world: World, run: Path) -> Loader:
    data = job.data
    lanes = Lanes(
        specs(data.sources, job.train.epochs, job.verify_bytes), tokenizer, lambda row, source: recipe.encode(row, tokenizer, source),
        lanes=data.lanes, seed=job.seed,
        shuffle=data.shuffle, seq_len=data.seq_len, lookahead=data.lookahead, too_long=data.too_long, temperature=data.mix.temperature, by=data.mix.by,
        exhausted=data.mix.exhausted, reorder=data.baskets == "shuffle",
        quarantine=str(run / "quarantine") if data.on_bad_row == "skip" else None, max_bad=data.max_bad,
    )  # fmt: skip
    return Loader(
        lanes, lanes=data.lanes, rows=job.train.rows, rank=world.data_rank, world_size=world.data_size,
        micro_rows=1 if job.train.deterministic else job.train.micro_rows, seq_len=data.seq_len, prefetch=data.prefetch, timeout_s=job.compute.timeout_s,
    )  # fmt: skip


def held_out_rows(job: Job, recipe: Recipe, tokenizer: Tokenizer) -> dict[str, list[list[Atom]]]:
    """The validation sets, packed."""
    encode = lambda row, source: recipe.encode(row, tokenizer, source)  # noqa: E731
    once = lambda name, spec: atoms_once({name: spec}, tokenizer=tokenizer, encode=encode, seq_len=job.data.seq_len, too_long=job.data.too_long)  # noqa: E731
    return {name: pack_all(once(name, spec), job.data.seq_len) for name, spec in specs(job.data.validation, None, job.verify_bytes).items()}
