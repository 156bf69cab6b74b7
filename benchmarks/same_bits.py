"""The final weights of tiny deterministic jobs of every kind, as SHA-256.
What changes no computation changes none of them.

    python benchmarks/same_bits.py            # compares with results/same_bits.json; exits 1 where one differs
    python benchmarks/same_bits.py --record   # writes it anew

Bits depend on the processor and on torch: digests are recorded for this kind of machine and compared on it alone.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.run import run  # noqa: E402
from tests.reliability import jobs  # noqa: E402
from tests.tiny import arithmetic  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "same_bits.json"
Make = Callable[[Path], dict[str, Any]]


def sft(directory: Path) -> dict[str, Any]:
    """Twelve steps on 200 sums: as many rows as when the digests were recorded."""
    return arithmetic(directory, rows=200) | {"checkpoint": {"every": 3, "keep": 2}}


def changed(section: str, **keys: Any) -> Make:
    """SFT with other keys in a section."""

    def made(directory: Path) -> dict[str, Any]:
        raw = sft(directory)
        raw[section] = {**raw[section], **keys}
        return raw

    return made


def experts(directory: Path) -> dict[str, Any]:
    raw = sft(directory)
    file = directory / "model" / "config.json"
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | mixture | kind | {"mlp_only_layers": []}))
    return raw


def mixture(directory: Path) -> dict[str, Any]:
    """Two sources with weights, several epochs, a learning rate that decays."""
    raw = arithmetic(directory)
    sums = raw["data"]["sources"]["sums"]
    held_out = raw["data"]["validation"]["held_out"]["path"]
    raw["data"] |= {
        "sources": {"a": {**sums, "sampling_weight": 3}, "b": {"path": held_out, "sampling_weight": 1}},
        "validation": {},
    }
    raw["train"] |= {"validate_every": 0, "schedule": "linear", "warmup_steps": 2, "lr_decay_steps": 5}
    return raw


def events(form: str) -> Make:
    def made(directory: Path) -> dict[str, Any]:
        from tests.train.test_events import FORMS, histories

        return histories(directory, **FORMS[form])

    return made


JOBS: dict[str, Make] = {
    # without those on Ray, and those whose wall clock decides
    **{n: make for n, make in jobs.JOBS.items() if n not in jobs.ONE_REPLICA and not n.endswith("wall")},
    "SFT": sft,
    "SFT, LoRA": changed("model", lora={"rank": 4}),
    "SFT, experts": experts,
    "SFT, two ranks": changed("compute", workers=2, launcher="torchrun"),
    "SFT, two ranks, tensor parallel": changed(
        "compute", workers=2, launcher="torchrun", mesh={"tensor_parallel_size": 2}
    ),
    "SFT, bf16": changed("train", precision="bf16"),
    "SFT, deterministic": changed("train", deterministic=True),
    "SFT, mixture": mixture,
    "events, items": events("items"),
    "events, semantic ids": events("semantic"),
    "events, head": events("head"),
}


def processor() -> str:
    """The processors by name and by number: those of one name may be of several designs, which round differently."""
    fields = dict(
        re.findall(r"^(cpu family|model|stepping)\s*: (\d+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    )
    return " ".join([cpu(), *(f"{name} {number}" for name, number in fields.items())])


def digest(directory: Path) -> str:
    """Of all tensors that a run exported, by name."""
    whole = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    machine = f"{processor()}, torch {torch.__version__}"
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not asked.record and machine not in known:
        sys.exit(f"nothing is recorded for {machine}: record it at a commit that is right (--record)")
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in JOBS.items():
            if asked.only and name not in asked.only:
                continue
            directory = Path(scratch) / str(len(found))
            directory.mkdir()
            found[name] = digest(run(loads(yaml.safe_dump(make(directory))), "run") / "model")
            same = "recorded" if asked.record else "same" if found[name] == known[machine].get(name) else "DIFFERENT"
            print(f"{name}: {found[name][:16]} {same}", flush=True)
    if asked.record:
        known[machine] = known.get(machine, {}) | found
        RECORD.write_text(json.dumps(known, indent=1) + "\n")
    elif different := [name for name in found if found[name] != known[machine].get(name)]:
        sys.exit(f"{len(different)} of {len(found)} jobs end with other weights: {', '.join(different)}")


if __name__ == "__main__":
    main()
