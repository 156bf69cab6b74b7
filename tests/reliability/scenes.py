"""The files that a run reads again, one kind of them at a time, made by tiny real runs; and how a run reads them
(tests/reliability/damage.py).

Every scene has a counterpart of another run, step or version with the same names, whose files are the likeliest to be
taken for its own.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import numpy as np
import torch
import yaml
from huggingface_hub import constants

from ptf import run as running
from ptf import storage
from ptf.artifact import Artifact
from ptf.compute import lease as leases
from ptf.compute import provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease, LeaseLost, Process, Record, RunInUse
from ptf.compute.tracking import StepLines
from ptf.config import Job, loads
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.data import prepare, tokenized
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.sources import hub
from ptf.data.sources.rows import blocks_once
from ptf.data.tokenizer import Tokenizer
from ptf.evaluate import gate
from ptf.evaluate.measurement import measure_run, read_row_metrics
from ptf.model import model_files
from ptf.rl.weights.stored import BucketFiles, write_buckets
from ptf.rl.weights.verification import check
from ptf.storage import file_verification, published_versions
from ptf.train import job_tokenizer
from ptf.train.export import probe_of, raise_if_damaged
from ptf.train.model_source import StartingModel
from ptf.train.tokenize import tokenize
from steps import retrain
from tests.data import hub_stub
from tests.reliability.damage import HARMS, Scene, held
from tests.tiny import arithmetic, checkpoint, codes, online, write_jsonl

PASSED_OVER = "is damaged|was never finished"
TEXTS = ["1+2=", "30-4=26", "++", "", "0123456789", "<|im_start|><|user|>7+8=<|im_end|>", "10-10=0"]


def at(job: Job, **changes: Any) -> Job:
    raw = job.model_dump()
    for key, value in changes.items():
        *sections, name = key.split("__")
        where = raw
        for section in sections:
            where = where[section]
        where[name] = value
    return loads(yaml.safe_dump(raw))


class Made:
    """Runs `a` and `b` of two seeds, and what else there is, below a directory;
    each made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.scenes: dict[Callable[[Made], Scene], Scene] = {}
        self.serving = contextlib.ExitStack()

    def close(self) -> None:
        self.serving.close()

    def place(self, *names: str) -> Path:
        place = self.directory.joinpath(*names)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    @cached_property
    def raw(self) -> dict[str, Any]:
        raw = arithmetic(self.directory)
        return raw | {"checkpoint": {"every": 3, "keep": 3}, "track": {"tensorboard": False, "samples_every": 1}}

    @cached_property
    def job(self) -> Job:
        return loads(yaml.safe_dump(self.raw))

    def trained(self, job: Job, name: str) -> Path:
        run = running.run(job, name)
        (run / "metrics.json").write_text(json.dumps(measure_run(job, run)))
        return run

    @cached_property
    def a(self) -> Path:
        return self.trained(self.job, "a")

    @cached_property
    def b(self) -> Path:
        return self.trained(at(self.job, seed=2), "b")

    @cached_property
    def online(self) -> Job:
        raw = online(self.raw, self.directory, group_size=2, max_new_tokens=4)
        dev = {"dev": raw["data"]["sources"]["p"]}
        raw["evaluate"] = {"sources": dev, "limit": 8, "max_new_tokens": 4, "samples_per_prompt": 1}
        raw["train"]["steps"] = 3
        raw["checkpoint"] = {"every": 1, "keep": 3}
        return loads(yaml.safe_dump(raw))

    @cached_property
    def c(self) -> Path:
        return self.trained(self.online, "c")

    @cached_property
    def d(self) -> Path:
        return self.trained(at(self.online, seed=2), "d")

    def of_run(self, kind: str, run: Path, other: Path, *names: str) -> tuple[Path, Path]:
        """Copies of a few files of two runs: a scene's directory, which keeps the run's name,
        and the counterpart."""
        for source, place in (
            (run, self.place("scenes", kind, run.name)),
            (other, self.place("others", kind, run.name)),
        ):
            place.mkdir(parents=True)
            for name in names:
                (shutil.copytree if (source / name).is_dir() else shutil.copyfile)(source / name, place / name)
        return self.place("scenes", kind, run.name), self.place("others", kind, run.name)


def checkpoints(kind: str, made: Made, run: Path, other: Path) -> Scene:
    root, others = made.of_run(kind, run, other, "checkpoints")

    def read() -> Any:
        found = Checkpoints(str(root / "checkpoints"), CheckpointConfig(every=1, keep=1), steps=1).latest()
        return None if found is None else (found[0], held(Path(found[1])))

    whole = [(int(place.name.removeprefix("step_")), held(place)) for place in sorted((root / "checkpoints").iterdir())]
    return Scene(root / "checkpoints", read, others / "checkpoints", PASSED_OVER, older=whole[:-1])


def sft_checkpoints(made: Made) -> Scene:
    return checkpoints("sft_checkpoints", made, made.a, made.b)


def grpo_checkpoints(made: Made) -> Scene:
    return checkpoints("grpo_checkpoints", made, made.c, made.d)


def rows_of(place: str, tokenizer: Tokenizer) -> list[Any]:
    found = []
    for block, *_ in blocks_once(tokenized.reader(place, tokenizer)):
        units = (unit for i in range(len(block)) for unit in block.row(i)["units"])
        found += [
            [
                (s.tokens.tolist(), s.loss_weights.tolist(), {k: v.tolist() for k, v in s.token_columns.items()})
                for s in unit
            ]
            for unit in units
        ]
    return found


def encoded(kind: str, made: Made, places: dict[str, str], others: dict[str, str]) -> Scene:
    """Directories of rows by source, the others under the same names."""
    root, counterpart = made.place("scenes", kind, "all"), made.place("others", kind, "all")
    for name, place in places.items():
        shutil.copytree(place, root / Path(place).name)
        shutil.copytree(others[name], counterpart / Path(place).name)
    tokenizer = Tokenizer.load(made.job.model.path)
    return Scene(
        root,
        lambda: {name: rows_of(str(root / Path(place).name), tokenizer) for name, place in places.items()},
        counterpart,
    )


def tokenized_data(made: Made) -> Scene:
    other = write_jsonl(
        made.directory / "other.jsonl",
        [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}] * 30,
    )
    sources = {"sums": {"path": str(other)}}
    tokenizer = Tokenizer.load(made.job.model.path)
    there = tokenize(made.job, tokenizer, 1)
    elsewhere = at(
        made.job,
        output=str(made.directory / "elsewhere"),
        data__sources=sources,
        data__validation={"held_out": {"path": str(other), "limit": 7}},
    )
    return encoded("tokenized", made, there, tokenize(elsewhere, tokenizer, 1))


def precomputed_data(made: Made) -> Scene:
    pairs = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n)} for n in range(1, 25)]
    path = str(write_jsonl(made.directory / "pairs.jsonl", pairs))
    sources = {"sources": {"sums": {"path": path}}, "validation": {"held_out": {"path": path, "limit": 9}}}
    raw = made.raw | {"recipe": "dpo", "algo": {"precompute": True}, "data": {**made.raw["data"], **sources}}
    found = []
    for seed in (1, 2):
        output = made.directory / f"ahead-{seed}"
        job = loads(yaml.safe_dump(raw | {"seed": seed, "output": str(output), "train": {**raw["train"], "steps": 1}}))
        running.run(job, "ahead")
        found.append({place.name.rpartition("-")[0]: str(place) for place in (output / "precomputed").iterdir()})
    return encoded("precomputed", made, *found)


def prepared_data(made: Made) -> Scene:
    def plugin(directory: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        write_jsonl(Path(directory) / "train.jsonl", [{"text": str(n)} for n in rng.integers(0, 100, 30).tolist()])
        np.save(Path(directory) / "vectors.npy", rng.normal(size=(5, 3)))
        (Path(directory) / "catalogue.json").write_text(json.dumps({"items": rng.integers(0, 100, 9).tolist()}))

    def make(root: Path, seed: int) -> list[str]:
        return [prepare.prepare(partial(plugin, seed=seed + key), f"key{key}", str(root)) for key in range(2)]

    root, counterpart = made.place("scenes", "prepared", "all"), made.place("others", "prepared", "all")
    first, _ = make(root, 0)
    make(counterpart, 5)
    return Scene(root, lambda: (Artifact("a", prepared=first).resolve(made.job).seed, held(Path(first))), counterpart)


def versions(made: Made, kind: str) -> tuple[Path, Path]:
    """Two published versions and the pointer to the newer one; elsewhere others of the same names, and a third."""
    roots = made.place("scenes", kind, "published"), made.place("others", kind, "published")
    for i, root in enumerate(roots):
        for n, name in enumerate(("one", "two", "third")[: 2 + i]):
            staged = str(checkpoint(made.place("staged", kind, str(i), name), seed=10 * i + n))
            storage.commit(staged, {"version": name, "metrics": {"loss": float(n)}, "data": {"sums": str(i)}})
            storage.upload(staged, f"{root}/{name}")
            published_versions.point(str(root), name, published_versions.pointer(str(root)))
    return roots


def versions_that_were_published(made: Made) -> Scene:
    root, counterpart = versions(made, "versions")

    def read() -> Any:
        place = model_files.locate(str(root))
        return place.name, held(place)

    return Scene(root, read, counterpart)


def rollback_target(made: Made) -> Scene:
    root, counterpart = versions(made, "rollback")

    def read() -> Any:
        found = published_versions.roll_back(str(root))
        return found, held(root / found.version)

    return Scene(root, read, counterpart, harmed=lambda name: not name.startswith("two/"), changes=True)


def localised_model(made: Made) -> Scene:
    """A copy of a model in an object store, and what is kept beside it."""
    store, uri = fsspec.filesystem("memory"), "memory://models/tiny"
    root, counterpart = made.place("scenes", "localised", "copies"), made.place("others", "localised", "copies")
    for seed, place in ((3, counterpart), (4, root)):
        store.store.clear()
        store.put(f"{checkpoint(made.place('uploaded', str(seed)), seed=seed)}/", "/models/tiny/", recursive=True)
        model_files.locate(uri, cache=str(place))
    (name,) = (place.name for place in root.iterdir() if place.is_dir())
    for place in list(counterpart.iterdir()):
        place.rename(counterpart / (name + (storage.COPIED if place.is_file() else "")))
    return Scene(root, lambda: held(model_files.locate(uri, cache=str(root))), counterpart)


def retraining(made: Made) -> Scene:
    root, counterpart = versions(made, "retrained")
    job = at(made.job, publish={"to": str(root), "metric": "loss/held_out"})
    artifact = Artifact("x", data={"sums": "changed"})
    for place, base in ((root, "two"), (counterpart, "third")):
        last = {"lineage": f"retrained-{base}", "how": "not published"}
        storage.write_record(f"{place}/{retrain.LAST}", retrain._inputs(job, artifact, base) | last)
    return Scene(
        root,
        lambda: retrain.has_new_data(job, artifact),
        counterpart,
        "changed since",
        older=[True],
        harmed=lambda name: name == retrain.LAST,
    )


def job_file(made: Made) -> Scene:
    root, counterpart = made.of_run("job", made.a, made.b, running.JOB)

    def read() -> Any:
        (root / "metrics.jsonl").write_text('{"step": 1}\n')  # a run without a step has nothing that is kept
        running.write_job_file(made.job, root)
        return (root / running.JOB).read_text()

    return Scene(root, read, counterpart)


def rows_file(made: Made, run: Path, other: Path, name: str, key: str) -> Scene:
    root, counterpart = made.of_run(name, run, other, name)
    steps = sorted((run / "checkpoints").iterdir())
    manifest = storage.manifest_of(str(steps[-2]))  # so that there are rows after it, too

    def read() -> Any:
        rows = StepLines(root / name, manifest["step"], expected=manifest[key])
        rows.file.close()
        return (root / name).read_text()

    return Scene(root, read, counterpart, "is missing: its", older=[""])


def metrics_file(made: Made) -> Scene:
    return rows_file(made, made.a, made.b, "metrics.jsonl", "rows")


def samples_file(made: Made) -> Scene:
    return rows_file(made, made.c, made.d, "samples.jsonl", "samples")


def held_out_rows(made: Made) -> Scene:
    root, counterpart = made.of_run("held_out", made.a, made.b, gate.LOSSES)
    metrics = json.loads((made.a / "metrics.json").read_text())
    return Scene(root, lambda: gate.comparisons(made.job, root, metrics), counterpart)


def answers(made: Made) -> Scene:
    root, counterpart = made.of_run("answers", made.c, made.d, gate.RESPONSES)
    metrics = json.loads((made.c / "metrics.json").read_text())
    return Scene(root, lambda: gate.comparisons(made.online, root, metrics), counterpart)


def measurements(made: Made) -> Scene:
    root, counterpart = made.of_run("compared", made.a, made.b, "compared.json")
    return Scene(root, lambda: read_row_metrics(root), counterpart)


def exported_model(made: Made) -> Scene:
    root, counterpart = made.of_run("exported", made.a, made.b, "model", "probe.json")

    def read() -> Any:
        raise_if_damaged(root, float("inf"))
        return held(root / "model"), probe_of(root)

    return Scene(root, read, counterpart)


def made_with(made: Made) -> Scene:
    root, counterpart = made.of_run("made_with", made.a, made.b, provenance.FILE)
    return Scene(root, lambda: provenance.read(root), counterpart)


def in_the_run(made: Made, kind: str, ask: Callable[[Job, Path], Any]) -> Scene:
    """What a run writes once and reads in all its stages."""
    root, counterpart = made.place("scenes", kind, "a"), made.place("others", kind, "b")
    for place, seed in ((root, 1), (counterpart, 2)):
        place.mkdir(parents=True)
        ask(at(made.job, seed=seed), place)
    return Scene(root, lambda: ask(made.job, root), counterpart)


def starting_weights(made: Made) -> Scene:
    def ask(job: Job, run: Path) -> Any:
        return held(StartingModel.of_job(job, run).with_weights().directory)

    return in_the_run(made, "start", ask)


def extended_model(made: Made) -> Scene:
    def ask(job: Job, run: Path) -> Any:
        job = at(job, model__tokens={"added": codes(3, job.seed + 1)})
        return held(StartingModel.of_job(job, run).directory)

    return in_the_run(made, "extended", ask)


def rendering(made: Made) -> Scene:
    """The tokenizer with the template of the job and the date of the run, and that date."""
    template = made.directory / "template.jinja"
    template.write_text(
        "{{ strftime_now('%d') }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )

    def ask(job: Job, run: Path) -> Any:
        job = at(job, model__chat_template=str(template))
        place = Path(StartingModel.of_job(job, run).tokenizer_path)
        return held(place), job_tokenizer.pinned_date(run)

    return in_the_run(made, "rendered", ask)


def lease_file(made: Made) -> Scene:
    """Whoever holds it checks it, and another process asks for it: afterwards one of them at most may write. The time
    of a heartbeat and who else is named may be damaged without a consequence."""
    root, counterpart = made.place("scenes", "lease", "a"), made.place("others", "lease", "a")
    me, other, beat = Process.this(), Process.this(), time.monotonic() - 60  # silent, however soon they are read
    for place, record in ((root, Record(7, me, time.time(), beat)), (counterpart, Record(8, other, time.time(), beat))):
        place.mkdir(parents=True)
        (place / leases.FILE).write_text(record.text)
    file = str(root / leases.FILE)
    holder = Lease(me.id, {file: 7})

    def holds(lease: Lease) -> bool:
        try:
            lease.check()
            return True
        except LeaseLost:
            return False

    def read() -> Any:
        before, leases.SILENT_S, leases.POLL_S = (leases.SILENT_S, leases.POLL_S), 0.02, 0.01
        try:
            first = holds(holder)
            newcomer = Process.this()
            with contextlib.suppress(RunInUse):
                second = Lease(newcomer.id, {file: leases._take(file, newcomer)})
                assert holds(second)
                return int(holds(holder)) + 1
            return int(first)
        finally:
            leases.SILENT_S, leases.POLL_S = before

    return Scene(root, read, counterpart, harmed=lambda name: name == leases.FILE, changes=True)


@contextlib.contextmanager
def remembering(place: Path) -> Iterator[None]:
    before, fresh = os.environ.get("PTF_CACHE"), file_verification.FRESH_NS
    os.environ["PTF_CACHE"] = str(place)
    file_verification.FRESH_NS = -1  # what was just written counts as settled
    try:
        yield
    finally:
        file_verification.FRESH_NS = fresh
        os.environ.pop("PTF_CACHE") if before is None else os.environ.__setitem__("PTF_CACHE", before)


def remembered(made: Made, kind: str) -> Scene:
    """Prepared data, and what is remembered of having verified them."""
    root, counterpart = made.place("scenes", kind, "a"), made.place("others", kind, "a")

    def write(directory: str) -> None:
        (Path(directory) / "x.txt").write_text("abc" * 50)

    def ask(place: Path) -> Any:
        with remembering(place / "cache"):
            return held(Path(prepare.prepare(write, "key", str(place / "prepared"))))

    for place in (root, counterpart):
        place.mkdir()
        ask(place)
        ask(place)
    for file in (counterpart / "cache").rglob("*.json"):
        (ours,) = (root / "cache").rglob("*.json")
        file.rename(file.with_name(ours.name))
    return Scene(
        root, lambda: ask(root), counterpart, harmed=lambda name: name.startswith("cache/") and name.endswith(".json")
    )


def memory(made: Made) -> Scene:
    return remembered(made, "memory")


def memory_and_data(made: Made) -> Scene:
    """Both are harmed."""
    scene = remembered(made, "memory_and_data")

    def also(harm: Callable[[Scene, Random], list[Path]]) -> Callable[[Scene, Random], list[Path]]:
        def both(of: Scene, rng: Random) -> list[Path]:
            with contextlib.suppress(IndexError):  # nothing is remembered yet
                harm(of, rng)
            return HARMS["flip"](data, rng)

        return both

    data = Scene(scene.root, scene.read, scene.foreign, harmed=lambda name: name.endswith("x.txt"))
    return Scene(
        scene.root,
        scene.read,
        scene.foreign,
        harmed=scene.harmed,
        harms={name: also(harm) for name, harm in HARMS.items()},
    )


def hub_pieces(made: Made) -> Scene:
    """What was read of a dataset of the Hub, which answers."""
    stub = made.serving.enter_context(hub_stub.running())
    constants.ENDPOINT, constants.HF_HOME = stub.url, str(made.place("home"))
    constants.HUGGINGFACE_CO_URL_TEMPLATE = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    contents = [{f"data/{name}.jsonl": os.urandom(700) for name in "ab"} for _ in range(2)]
    ours, theirs = (stub.push("x/y", files) for files in contents)

    def ask(commit: str) -> Any:
        hub._check_reachable.cache_clear()
        return {name: hub.open_read(hub.uri("x/y", commit, name)).read() for name in hub.tree("x/y", commit)}

    assert (ask(ours), ask(theirs)) == tuple(contents)
    return Scene(hub._cache_directory("x/y", ours), lambda: ask(ours), hub._cache_directory("x/y", theirs))


def weights_on_their_way(made: Made) -> Scene:
    """From the trainer to an engine, in files."""
    root, counterpart = made.place("scenes", "sync", "files"), made.place("others", "sync", "files")
    manifests = []
    for seed, place in ((0, root), (1, counterpart)):
        tensors = [
            (f"layers.{i}.weight", torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + i)))
            for i in range(6)
        ]
        manifests.append(write_buckets(tensors, place, 5, limit=100)[1])
    buckets = BucketFiles(sorted((root / "5").iterdir()))

    def read() -> Any:
        check(buckets, manifests[0], current=4)
        return {name: tensor.tolist() for bucket in buckets for name, tensor in bucket}

    return Scene(root, read, counterpart)


def tokenizer_of_a_resume(made: Made) -> Scene:
    """Of a model that ptf did not publish: its identity is in the checkpoint."""
    root, counterpart = made.place("scenes", "tokenizer", "a"), made.place("others", "tokenizer", "a")
    for place, characters, stops in ((root, "0123456789+-=", [1, 2]), (counterpart, "9876543210+-= ", [1, 3])):
        character_tokenizer(characters, place)
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    whole = Tokenizer.load(str(root))

    def read() -> Any:
        found = Tokenizer.load(str(root))
        found.raise_if_different(whole.identity, str(root))
        found.raise_if_other_stops(whole.stop_ids, str(root))
        return found.encode_all(TEXTS), found.stop_ids, found.hf.chat_template

    return Scene(root, read, counterpart)


SCENES: dict[str, Callable[[Made], Scene]] = {
    "checkpoints of SFT (weights, optimizer, DCP's index, host state, manifest)": sft_checkpoints,
    "checkpoints of GRPO (the same, and the controller's state)": grpo_checkpoints,
    "tokenized data": tokenized_data,
    "precomputed log-probs of a reference": precomputed_data,
    "prepared data": prepared_data,
    "published versions and latest.json": versions_that_were_published,
    "target of a rollback and latest.json": rollback_target,
    "copy of a remote model, and what is kept of it": localised_model,
    "retrained.json": retraining,
    "job.yaml": job_file,
    "metrics.jsonl": metrics_file,
    "samples.jsonl": samples_file,
    "held-out losses by row, for the gate": held_out_rows,
    "answers, for the gate": answers,
    "compared.json": measurements,
    "exported model and its probe": exported_model,
    "made_with.json": made_with,
    "starting weights": starting_weights,
    "extended model": extended_model,
    "rendered tokenizer and date.json": rendering,
    "lease.json": lease_file,
    "what is remembered of verified files": memory,
    "that, and the files themselves": memory_and_data,
    "what was read of the Hub": hub_pieces,
    "weights on their way to an engine": weights_on_their_way,
    "tokenizer of a model of others, on resume": tokenizer_of_a_resume,
}
