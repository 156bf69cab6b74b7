"""A handful of what benchmarks/damage.py does in full: whatever file of a run is harmed,
nothing else is read than was written without a word."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from ptf import storage
from ptf.errors import UserError
from ptf.storage import file_verification
from tests.reliability import scenes
from tests.reliability.damage import HARMS, SAID, Scene, put, swapped, trials
from tests.reliability.scenes import SCENES, Made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("damage")
        patch.setenv("PTF_CACHE", str(directory / "cache"))
        for name in ("ENDPOINT", "HF_HOME", "HUGGINGFACE_CO_URL_TEMPLATE"):
            patch.setattr(constants, name, getattr(constants, name))  # a scene changes them
        with contextlib.closing(Made(directory)) as made:
            yield made


def whole(made: Made, make: Callable[[Made], Scene]) -> tuple[Scene, Path]:
    place = made.directory / "whole" / make.__name__
    if not place.exists():
        made.scenes[make] = make(made)
        shutil.copytree(made.scenes[make].root, place)
    return made.scenes[make], place


@pytest.mark.long
@pytest.mark.parametrize("kind", SCENES)
def test_nothing_is_silent(made: Made, kind: str) -> None:
    outcomes, faults = trials(*whole(made, SCENES[kind]), 8, seed=1000)
    assert faults == []
    assert sum(outcomes.values()) == 8


@pytest.mark.long
def test_a_checkpoint_that_was_harmed_gives_way_to_the_one_before_it(made: Made) -> None:
    outcomes, faults = trials(*whole(made, scenes.sft_checkpoints), 40, seed=1)
    assert faults == []
    assert outcomes[SAID] > 5


@pytest.mark.parametrize("kind", ["checkpoints of SFT", "exported model"])
def test_the_trials_see_what_is_silent(made: Made, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Negative control: without reading the files, only their sizes are known."""
    scene, place = whole(made, next(make for name, make in SCENES.items() if name.startswith(kind)))
    sizes = file_verification.verify
    monkeypatch.setattr(
        file_verification, "verify", lambda directory, up_to=0.0, *more, **named: sizes(directory, 0.0, *more, **named)
    )
    monkeypatch.setattr(file_verification, "_sha256", lambda uri, *_: place_hash(scene, place, uri))
    monkeypatch.setattr("tests.reliability.damage.HARMS", {"flip": HARMS["flip"]})
    assert any("silent" in fault or "Error" in fault for fault in trials(scene, place, 20, seed=0)[1])


def place_hash(scene: Scene, place: Path, uri: str) -> str:
    """Of the file as it was."""
    return hashlib.sha256((place / Path(uri).relative_to(scene.root)).read_bytes()).hexdigest()


def digit(file: Path) -> None:
    """Another number, in text that is as good as it was."""
    text = file.read_text()
    found = re.search(r"\d(?=\.\d)", text) or re.search(r"\d", text)
    assert found is not None
    file.write_text(text[: found.start()] + str((int(found[0]) + 1) % 10) + text[found.end() :])


def bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def only(root: Path, pattern: str) -> Path:
    return sorted(root.glob(pattern))[0]


FAULTS = {  # what was read without a word before it was verified
    "a number in metrics.jsonl": (scenes.metrics_file, lambda root: digit(root / "metrics.jsonl")),
    "an answer that was kept": (scenes.samples_file, lambda root: digit(root / "samples.jsonl")),
    "annotations of other data": (
        scenes.precomputed_data,
        lambda root: swapped(only(root, "sums-*"), only(root, "held_out-*")),
    ),
    "a bit of the starting weights": (scenes.starting_weights, lambda root: bit(root / "start" / "model.safetensors")),
    "the starting weights for the extended ones": (
        scenes.extended_model,
        lambda root: swapped(root / "start", root / "extended"),
    ),
    "a bit of the exported model": (scenes.exported_model, lambda root: bit(root / "model" / "model.safetensors")),
    "a log-prob of the probe": (scenes.exported_model, lambda root: digit(root / "probe.json")),
    "a loss for the gate": (scenes.held_out_rows, lambda root: digit(root / "held_out" / "held_out.jsonl")),
    "an answer for the gate": (scenes.answers, lambda root: digit(root / "responses" / "dev.jsonl")),
    "a measurement": (scenes.measurements, lambda root: digit(root / "compared.json")),
    "what a model was made with": (scenes.made_with, lambda root: digit(root / "made_with.json")),
    "the day on which a run began": (scenes.rendering, lambda root: digit(root / "date.json")),
    "what the last retraining was made of": (scenes.retraining, lambda root: digit(root / "retrained.json")),
    "a setting in job.yaml": (scenes.job_file, lambda root: digit(root / "job.yaml")),
    "a lease that is no text": (scenes.lease_file, lambda root: (root / "lease.json").write_bytes(b"\xff")),
    "a copy's list that is no text": (
        scenes.localised_model,
        lambda root: only(root, "*.files.json").write_bytes(b"\xff"),
    ),
    "a pretokenizer": (scenes.tokenizer_of_a_resume, lambda root: pretokenized(root / "tokenizer.json")),
    "what ends an answer": (scenes.tokenizer_of_a_resume, lambda root: digit(root / "generation_config.json")),
}


def pretokenized(file: Path) -> None:
    said = json.loads(file.read_text())
    # of no text that is probed
    splits = {"type": "Split", "pattern": {"String": "+-+-"}, "behavior": "Removed", "invert": False}
    both = [p for p in (splits, said["pre_tokenizer"]) if p]
    file.write_text(json.dumps({**said, "pre_tokenizer": {"type": "Sequence", "pretokenizers": both}}))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_silent_is_refused(made: Made, fault: str) -> None:
    make, harm = FAULTS[fault]
    scene, place = whole(made, make)
    put(place, scene.root)
    scene.read()
    put(place, scene.root)
    harm(scene.root)
    with pytest.raises(UserError):
        scene.read()


def test_pieces_of_the_hub_that_changed_places_are_fetched_again(made: Made) -> None:
    scene, place = whole(made, scenes.hub_pieces)
    put(place, scene.root)
    swapped(scene.root / "pieces/data/a.jsonl", scene.root / "pieces/data/b.jsonl")
    found = scene.read()
    put(place, scene.root)
    assert found == scene.read()
    assert len(set(found.values())) == 2


def test_a_checkpoint_without_a_manifest_is_said(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    scene, place = whole(made, scenes.sft_checkpoints)
    put(place, scene.root)
    os.remove(max(scene.root.iterdir()) / storage.MANIFEST)
    assert scene.read() in scene.older
    assert "step_00000012 was never finished: it has no manifest.json" in capsys.readouterr().out
