"""Damage to every kind of file that a run reads again, and the run's reaction.

A scene is a directory that ptf wrote, and the call by which a run reads it. A trial restores the directory, damages one
file and calls. It passes if the result is what was written, if the error names the file, or if the console says what
was done instead; any other outcome is silent damage.
"""

import contextlib
import io
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ptf.errors import UserError
from ptf.rl.weights.verification import SyncError


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def held(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in files(directory)}


Harm = Callable[["Scene", Random], list[Path]]  # what was touched


@dataclass(frozen=True)
class Scene:
    """`read` gives what a run goes on with, to be compared by ==. `foreign`: the same of another run, step or version.
    `older`: what else it may go on with where the console says so, in words that match `said`. `harmed`:
    the files that are harmed (by default all)."""

    root: Path
    read: Callable[[], Any]
    foreign: Path
    said: str = ""
    older: Sequence[Any] = ()
    harmed: Callable[[str], bool] = lambda name: True
    harms: Mapping[str, Harm] | None = None
    changes: bool = False  # reading does, so that it cannot be read twice

    def files(self) -> list[Path]:
        return [path for path in files(self.root) if self.harmed(str(path.relative_to(self.root)))]


def truncate(scene: Scene, rng: Random) -> list[Path]:
    path = rng.choice([path for path in scene.files() if path.stat().st_size])
    os.truncate(path, rng.randrange(path.stat().st_size))
    return [path]


def flip(scene: Scene, rng: Random) -> list[Path]:
    """A bit, in place; now and then with the times that the file had before."""
    path = rng.choice([path for path in scene.files() if path.stat().st_size])
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    with path.open("r+b") as file:
        file.write(data)
    if rng.random() < 0.5:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return [path]


def drop(scene: Scene, rng: Random) -> list[Path]:
    path = rng.choice(scene.files())
    path.unlink()
    return [path]


def swap(scene: Scene, rng: Random) -> list[Path]:
    """Two files, or two directories, change names; a file that is alone gives its name to another, which is gone."""
    found = scene.files()
    folders = sorted({path.parent for path in found if path.parent != scene.root})
    if len(folders) > 1 and rng.random() < 0.3:
        a, b = rng.sample(folders, 2)
        if a in b.parents or b in a.parents:
            a, b = found[0], found[-1]
    elif len(found) > 1:
        a, b = rng.sample(found, 2)
    else:
        (a,) = found
        return [a.rename(a.with_name(a.name + ".other")), a]
    swapped(a, b, scene.root.with_name("aside"))
    return [a, b]


def swapped(one: Path, other: Path, aside: Path | None = None) -> None:
    aside = aside or one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def foreign(scene: Scene, rng: Random) -> list[Path]:
    """The file of this name of another run, step or version."""
    found = [path for path in scene.files() if (scene.foreign / path.relative_to(scene.root)).is_file()]
    path = rng.choice(found)
    shutil.copyfile(scene.foreign / path.relative_to(scene.root), path)
    return [path]


def grow(scene: Scene, rng: Random) -> list[Path]:
    path = rng.choice(scene.files())
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))
    return [path]


HARMS: dict[str, Harm] = {f.__name__: f for f in (truncate, flip, drop, swap, foreign, grow)}

NAMED, SAID, EQUAL, CHANCE = (
    "refused by name",
    "an older one, or none, and said so",
    "what was written all the same",
    "the same bytes by chance",
)
OUTCOMES = NAMED, SAID, EQUAL, CHANCE


def trials(scene: Scene, whole: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Harm what is `whole` so many times, each time anew: how often what came of it, and what was silent,
    or an error that names nothing."""
    harms = scene.harms or HARMS
    rng, outcomes, faults = Random(seed), Counter[str](), list[str]()
    put(whole, scene.root)
    wanted = quietly(scene.read)[0]
    for n in range(count):
        put(whole, scene.root)
        if not scene.changes and rng.random() < 0.5:
            quietly(scene.read)  # so that what is remembered of these files is put to the test, too
        kind = rng.choice(sorted(harms))
        touched = harms[kind](scene, rng)
        names = {path.name for path in touched} | {path.parent.name for path in touched}
        at = f"{kind} of {', '.join(str(path.relative_to(scene.root)) for path in touched)} (trial {n} of seed {seed})"
        changed = {
            str(path.relative_to(scene.root))
            for path in touched
            if not same(path, whole / path.relative_to(scene.root))
        }
        try:
            found, said = quietly(scene.read)
        except (UserError, SyncError) as error:
            if any(name in str(error) for name in names):
                outcomes[NAMED] += 1
            else:
                faults.append(f"{at}: refused without a name: {error}")
            continue
        except Exception as error:
            faults.append(f"{at}: {type(error).__name__}: {error}")
            continue
        if not changed:
            outcomes[CHANCE] += 1
        elif found == wanted:
            outcomes[EQUAL] += 1
        elif found in scene.older and re.search(scene.said, said):
            outcomes[SAID] += 1
        else:
            faults.append(f"{at}: silent")
    return outcomes, faults


def same(one: Path, other: Path) -> bool:
    if one.is_dir() and other.is_dir():
        return held(one) == held(other)
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def put(whole: Path, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(whole, root)


def quietly(read: Callable[[], Any]) -> tuple[Any, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = read()
    return found, said.getvalue()
