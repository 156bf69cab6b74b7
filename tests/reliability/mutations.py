"""Damaging checkpoints, and what then is taken for one.

The one idea: what `Checkpoints.latest` returns is compared, byte for byte, with what was there before; anything else must be an error.
"""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from ptf.compute.checkpoint import Checkpoints
from ptf.errors import UserError


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def held(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in files(directory)}


def truncate(root: Path, rng: Random) -> None:
    path = rng.choice(files(root))
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def flip(root: Path, rng: Random) -> None:
    path = rng.choice(files(root))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def drop(root: Path, rng: Random) -> None:
    rng.choice(files(root)).unlink()


def swap(root: Path, rng: Random) -> None:
    """Two files of one checkpoint, or two whole checkpoints, change names."""
    directory = rng.choice(sorted(root.iterdir()))
    a, b = rng.sample(files(directory), 2) if rng.random() < 0.7 else rng.sample(sorted(root.iterdir()), 2)
    aside = root / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def mix(root: Path, rng: Random) -> None:
    """A file of another step's takes the place of this step's."""
    a, b = rng.sample(sorted(root.iterdir()), 2)
    path = rng.choice(files(a))
    other = b / path.relative_to(a)
    if other.exists():
        shutil.copyfile(other, path)


def grow(root: Path, rng: Random) -> None:
    with rng.choice(files(root)).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


MUTATIONS: dict[str, Callable[[Path, Random], None]] = {f.__name__: f for f in (truncate, flip, drop, swap, mix, grow)}


def sweep(checkpoints: Path, scratch: Path, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Damage a copy `count` times, each time anew: what came of it, and what was taken for whole although it was not."""
    rng, outcomes, silent = Random(seed), Counter(), []
    whole = {path.name: held(path) for path in checkpoints.iterdir()}
    newest = max(whole)
    for n in range(count):
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkpoints, copy)
        kind = rng.choice(sorted(MUTATIONS))
        MUTATIONS[kind](copy, rng)
        try:
            with contextlib.redirect_stdout(None):
                found = Checkpoints(str(copy), every=1, keep=1, steps=1).latest()
        except UserError:
            outcomes["refused all"] += 1
            continue
        if found is None:
            outcomes["none left"] += 1
            continue
        name = Path(found[1]).name
        if held(copy / name) != whole[name]:
            silent.append(f"{n}: {kind}: {name} is not what it was")
        outcomes["newest" if name == newest else "one before it"] += 1
    return outcomes, silent
