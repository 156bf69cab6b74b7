"""The final weights of tiny deterministic jobs of every kind, and their metrics without clocks, as SHA-256.
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
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.data.tokenizer import Tokenizer  # noqa: E402
from ptf.run import run  # noqa: E402
from ptf.tasks.tiny import ARCHITECTURES  # noqa: E402
from ptf.train.tokenize import tokenize  # noqa: E402
from tests.reliability import jobs  # noqa: E402
from tests.tiny import SIZES, arithmetic, configured  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "same_bits.json"
Make = Callable[[Path], dict[str, Any]]
TWO_RANKS = {"workers": 2, "launcher": "torchrun"}
LORA = {"rank": 4}
# metrics of clocks and of memory
CLOCKS = re.compile(r"^(time|mfu|seconds/.*|peak_memory_gib.*)$|_s$")


def sft(directory: Path) -> dict[str, Any]:
    """Twelve steps on 200 sums: as many rows as when the digests were recorded."""
    return arithmetic(directory, rows=200) | {"checkpoint": {"every": 3, "keep": 2}}


def changed(section: str, job: Make = sft, **keys: Any) -> Make:
    """SFT, or another job, with other keys in a section."""

    def made(directory: Path) -> dict[str, Any]:
        raw = job(directory)
        raw[section] = {**raw[section], **keys}
        return raw

    return made


def tokenized(directory: Path) -> dict[str, Any]:
    """SFT on sources that were tokenized ahead, plainly: token ids and loss weights, no columns."""
    raw = sft(directory)
    made = tokenize(loads(yaml.safe_dump(raw)), Tokenizer.load(raw["model"]["path"]), 1)
    for part in ("sources", "validation"):
        raw["data"][part] = {name: {"path": made[name], "kind": "tokenized"} for name in raw["data"][part]}
    return raw


def family(model_type: str, **settings: Any) -> Make:
    """SFT of a small random model of a family."""

    def made(directory: Path) -> dict[str, Any]:
        raw = sft(directory)
        file = directory / "model" / "config.json"
        known = SIZES | json.loads(file.read_text()) | ARCHITECTURES.get(model_type, {})
        file.write_text(json.dumps(known | settings | {"model_type": model_type}))
        return raw

    return made


def foreign(directory: Path) -> dict[str, Any]:
    """SFT of a model of transformers."""
    from tests.train.test_hf_jobs import job

    return job(directory, "olmo2")


def on_two_ranks(directory: Path) -> dict[str, Any]:
    """GRPO whose policy and reference have two ranks, on a Ray of the run's own."""
    raw = jobs.JOBS["GRPO"](directory)
    raw["compute"] |= {"launcher": "ray", "workers": 2, "threads": 1, "timeout_s": 300}
    return raw


def experts(directory: Path) -> dict[str, Any]:
    raw = sft(directory)
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1}
    configured(directory / "model", **mixture | kind, mlp_only_layers=[])
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
    "SFT, LoRA": changed("model", lora=LORA),
    "SFT, experts": experts,
    "SFT, two ranks": changed("compute", **TWO_RANKS),
    "SFT, two ranks, tensor parallel": changed("compute", **TWO_RANKS, mesh={"tensor_parallel_size": 2}),
    "SFT, four ranks, two replicas": changed("compute", **TWO_RANKS | {"workers": 4}, mesh={"replicate": 2}),
    "SFT, bf16": changed("train", precision="bf16"),
    "SFT, deterministic": changed("train", deterministic=True),
    "SFT, mixture": mixture,
    "SFT, tokenized": tokenized,
    "SFT, transformers backend": foreign,
    "SFT, NF4": changed("model", family("qwen3", intermediate_size=128), lora=LORA, quantization="nf4"),
    "SFT, AdamW in 8 bits": changed("train", optimizer="adamw_8bit"),
    "SFT, moments offloaded": changed("train", optimizer="adamw_offload"),
    "SFT, activations offloaded": changed("train", activation_checkpointing="offload"),
    "SFT, linear attention": family("qwen3_next", num_hidden_layers=3),
    "SFT, latent attention": family("deepseek_v3"),
    "SFT, sinks": family(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
    ),
    "DPO, two ranks": changed("compute", jobs.JOBS["DPO"], **TWO_RANKS),
    "RM, two ranks": changed("compute", jobs.JOBS["RM"], **TWO_RANKS),
    "KD, two ranks": changed("compute", jobs.JOBS["KD"], **TWO_RANKS),
    "GRPO, LoRA": changed("model", jobs.JOBS["GRPO"], lora=LORA),
    "GRPO, two ranks": on_two_ranks,
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


def metrics_digest(directory: Path) -> str:
    """Of all rows of metrics, without those of clocks and memory."""
    rows = [
        {name: value for name, value in row.items() if not CLOCKS.search(name)}
        for row in read_metrics(directory / "metrics.jsonl")
    ]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


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
        for number, (name, make) in enumerate(JOBS.items()):
            if asked.only and name not in asked.only:
                continue
            directory = Path(scratch) / str(number)
            directory.mkdir()
            made = run(loads(yaml.safe_dump(make(directory))), "run")
            for key, one in ((name, digest(made / "model")), (f"{name}: metrics", metrics_digest(made))):
                found[key] = one
                then = one if asked.record else known[machine].get(key, "")
                same = (
                    "recorded" if asked.record else "same" if one == then else "DIFFERENT" if then else "NOT ON RECORD"
                )
                print(f"{key}: {one[:16]} {same}", flush=True)
    if asked.record:
        known[machine] = known.get(machine, {}) | found
        RECORD.write_text(json.dumps(known, indent=1) + "\n")
    elif different := [name for name in found if found[name] != known[machine].get(name)]:
        sys.exit(f"{len(different)} of {len(found)} digests are others, or not on record: {', '.join(different)}")


if __name__ == "__main__":
    main()
