"""Jobs on tiny random models of transformers' architectures that ptf does not define (`model.backend: hf`), and on the
language models of multimodal ones. Writes results/hf_backend.md, and hf_backend.jsonl as it goes.

    python benchmarks/hf_backend.py [--types gpt2 olmo2] [--minutes 55]

For each architecture: what is loaded against transformers' own forward pass, what one document changes in another, and
a few steps of SFT, LoRA, DPO and GRPO (native engine). A loss that does not fall, or an error, is in the table by its
first line. An architecture that hf_backend.jsonl has is not made again.
"""

import contextlib
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.commands import options
from benchmarks.flow_runs import results_page
from benchmarks.pages import Row, head, keep, kept, table, write_page
from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import loads
from ptf.config.sections.model import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import hf_backend
from ptf.model.head import Head
from ptf.run import run
from ptf.train.trainer import load_model
from tests.model.wrappers import wrapper
from tests.tiny import arithmetic, packed, write_jsonl

RESULTS = results_page("hf_backend.md")
STEPS, DPO_STEPS = 12, 20
TYPES = [
    *("gemma", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "phi3", "phimoe", "stablelm"),
    *("starcoder2", "codegen", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe"),
    *("granitemoeshared", "granitemoehybrid", "smollm3", "glm", "glm4", "glm4_moe", "exaone4", "nemotron"),
    *("persimmon", "mpt", "bloom", "falcon", "falcon_h1", "mamba", "mamba2", "falcon_mamba", "jamba", "bamba"),
    *("zamba", "zamba2", "recurrent_gemma", "qwen2_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "minimax"),
    *("mixtral", "dots1", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss"),
    *("arcee", "helium", "apertus", "lfm2", "ministral", "llama4_text", "gpt_bigcode", "biogpt", "xglm"),
    *("dbrx", "jetmoe", "diffllama", "bitnet", "vaultgemma", "nemotron_h", "rwkv", "xlstm"),
]
MULTIMODAL = [
    *("llama4", "gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe", "glm46v", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "llava", "llava_next", "llava_onevision", "internvl", "paligemma"),
    *("idefics2", "idefics3", "smolvlm", "mistral3", "aya_vision", "cohere2_vision", "ovis2", "aria"),
    *("deepseek_vl", "exaone4_5", "lfm2_vl", "got_ocr2", "mllama"),
]
# size → the settings that get it
OF_SIZE = {
    32: "hidden_size word_embed_proj_dim lru_width",
    2: (
        "num_hidden_layers num_key_value_heads num_experts_per_tok moe_k moe_topk linear_num_key_heads n_mamba_heads "
        "mamba_expand"
    ),
    4: (
        "num_attention_heads rotary_dim num_experts num_local_experts n_routed_experts moe_num_experts "
        "linear_num_value_heads state_size mamba_d_state mamba_dt_rank mamba_n_heads"
    ),
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim",
    48: "intermediate_size ffn_dim ffn_hidden_size intermediate_size_mlp",
    256: "max_position_embeddings",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size",
    1: (
        "moe_num_shared_experts n_shared_experts n_group topk_group first_k_dense_replace mamba_ngroups "
        "mamba_n_groups n_groups"
    ),
    16: "q_lora_rank kv_lora_rank mamba_d_head mamba_headdim chunk_size mamba_chunk_size",
    64: "mamba_d_ssm sliding_window attention_window_size",
}
SIZES = {name: size for size, names in OF_SIZE.items() for name in names.split()}
EXTRAS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "zamba": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "use_mamba_kernels": False,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"],
        "adapter_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_multiple_of": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "deepseek_v2": {"head_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 64},
    "dbrx": {
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "jetmoe": {"kv_channels": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "hybrid_override_pattern": "M*", "mamba_num_heads": 4},
    "xlstm": {"num_heads": 4},
    "rwkv": {"attention_hidden_size": 32},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}


def config_of(model_type: str, vocab: int) -> Any:
    """Return a small config: each size that the architecture's config has."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    fixed = {key for key in SIZES if isinstance(getattr(type(default), key, None), property)}
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if hasattr(default, key) and key not in fixed}
    if "layer_types" in default.to_dict() and "layer_types" not in EXTRAS.get(model_type, {}):
        sizes["layer_types"] = None
    sizes |= EXTRAS.get(model_type, {})
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    try:
        return AutoConfig.for_model(model_type, vocab_size=vocab, initializer_range=0.2, **sizes, **ids)
    except Exception:
        sizes.pop("layer_types", None)
        return AutoConfig.for_model(model_type, vocab_size=vocab, initializer_range=0.2, **sizes, **ids)


def made(directory: Path, model_type: str) -> dict[str, Any]:
    """Make a checkpoint, a tokenizer and data; return a raw job."""
    from transformers import AutoModelForCausalLM

    raw = arithmetic(directory)
    tokenizer = Tokenizer.load(str(directory / "model"))
    torch.manual_seed(0)
    if model_type in MULTIMODAL:  # some tokens more, which stand for images
        wrapper(directory / "made", model_type, tokenizer.vocab_size + 8)
    else:
        model = AutoModelForCausalLM.from_config(config_of(model_type, tokenizer.vocab_size), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms that all do something
                if parameter.dim() == 1:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(directory / "made")
    for file in (directory / "made").iterdir():
        file.replace(directory / "model" / file.name)
    return {
        **raw,
        "model": {"path": str(directory / "model"), "backend": "hf"},
        "train": {**raw["train"], "steps": STEPS, "lr": 1e-2},
        "checkpoint": {"every": 100},
    }


def without_validation(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the job without held-out data."""
    train = {k: v for k, v in raw["train"].items() if k != "validate_every"}
    return {**raw, "train": train, "data": {k: v for k, v in raw["data"].items() if k != "validation"}}


def preferences(directory: Path) -> str:
    """Write pairs; return their file."""
    sums = np.random.default_rng(5).integers(1, 30, (60, 2)).tolist()
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    return str(write_jsonl(directory / "pairs.jsonl", pairs))


def jobs(raw: dict[str, Any], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the jobs by name."""
    raw = without_validation(raw)
    prompts = {"sums": {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}}
    lora = {"rank": 4, "alpha": 8}
    return {
        "sft": raw,
        "lora": {**raw, "model": {**raw["model"], "lora": lora}, "train": {**raw["train"], "lr": 3e-2}},
        "dpo": {
            **raw,
            "recipe": "dpo",
            "train": {**raw["train"], "steps": DPO_STEPS, "lr": 2e-3},
            "algo": {"beta": 0.5},
            "data": {**raw["data"], "sources": {"pairs": {"path": preferences(directory)}}},
        },
        "grpo": {
            **raw,
            "recipe": "grpo",
            "data": {"sources": prompts, "seq_len": 64},
            "rollout": {
                "engine": "native",
                "prompts_per_step": 4,
                "group_size": 4,
                "max_new_tokens": 6,
                "reward": {"use": "tests.rl.plugs:varied"},
            },
            "train": {"steps": 3, "lr": 1e-3, "precision": "fp32", "micro_batch_sequences": 2},
        },
    }


@torch.no_grad()
def compared(directory: Path) -> dict[str, float]:
    """Return how far the loaded model is from transformers' own logits, and what a document changes in another."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    spec = ModelConfig(path=str(directory), backend="hf")
    model = load_model(directory, World(), spec, seed=0, precision="fp32")
    multimodal = AutoConfig.from_pretrained(directory).model_type in MULTIMODAL
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    theirs = kind.from_pretrained(directory, dtype=torch.float32).eval()
    batch = packed([[20, 37, 7]], 64)
    vocab = model.config.vocab - 8 * multimodal
    tokens = batch.tokens % vocab
    head: Callable[[torch.Tensor, Head], torch.Tensor] = lambda x, head: head.logits(x)  # noqa: E731
    ours = model(tokens, batch.positions, batch.segments, head)
    apart = largest = 0.0
    for document in range(3):
        at = batch.segments == document
        expected = theirs(input_ids=tokens[at][None], use_cache=False).logits[0].float()
        apart = max(apart, float((ours[at] - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    own = batch.segments == 1
    again = model(torch.where(own, tokens, (tokens + 1) % vocab), batch.positions, batch.segments, head)
    return {"apart": apart / largest, "leak": float((again - ours)[own].abs().max()) / largest}


def carried(source: Path, export: Path) -> str:
    """Return how many tensors an export has unchanged of those that are not trained, or what is wrong."""
    before, after = (load_file(directory / "model.safetensors") for directory in (source, export))
    outside = {name for name, *_ in hf_backend.build(source, head="lm").carried(source)}
    if before.keys() != after.keys():
        return f"other names: {sorted(before.keys() ^ after.keys())[0]}"
    changed = [n for n in sorted(outside) if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])]
    still = [n for n in before.keys() - outside if torch.equal(before[n], after[n])]
    if changed:
        return f"changed: {changed[0]}"
    return f"{len(outside)}; {len(before) - len(outside) - len(still)} of {len(before) - len(outside)}"


def outcome(name: str, raw: dict[str, Any]) -> Any:
    """Run a job; return the mean loss of the last four steps, of GRPO the largest difference of a log-prob, or what
    went wrong, in words."""
    try:
        directory = run(loads(yaml.safe_dump(raw)), name)
    except UserError as error:
        return "refused: " + str(error).strip().splitlines()[0]
    except Exception as error:  # whatever it is, it is what the table is for
        return f"fails: {type(error).__name__}: " + next(iter(str(error).strip().splitlines()), "")
    rows = read_metrics(directory / "metrics.jsonl")
    if name == "grpo":
        return max(row["logprob_diff_max"] for row in rows)
    return float(np.mean([row["loss"] for row in rows[-4:]]))


def judged(found: float | str, untrained: float) -> str:
    """Return the outcome of a job in words, beside the loss of the untrained model."""
    if isinstance(found, str):
        return found
    return f"{'falls' if found < 0.98 * untrained else 'DOES NOT FALL'}: {untrained:.3g} → {found:.3g}"


def control(raw: dict[str, Any]) -> float:
    """Run SFT without learning; return the mean loss of the last four steps."""
    directory = run(loads(yaml.safe_dump({**raw, "train": {**raw["train"], "lr": 1e-12}})), "control")
    return float(np.mean([row["loss"] for row in read_metrics(directory / "metrics.jsonl")[-4:]]))


def measured(model_type: str) -> dict[str, Any]:
    """Return a row of the table."""
    began, row = time.process_time(), dict[str, Any](model_type=model_type)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        try:
            raw = made(directory, model_type)
        except Exception as error:
            return {**row, "made": f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                row |= compared(directory / "model")
                row["control"] = control(jobs(raw, directory)["sft"])
            except UserError as error:
                return {**row, "refused": str(error).strip().splitlines()[0].replace(f"{directory}/", "")}
            except Exception as error:
                return {**row, "refused": f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"}
            for name, job in jobs(raw, directory).items():
                row[name] = outcome(name, job)
        lines = printed.getvalue().splitlines()
        row["uncached"] = next(
            (line.partition("for each token: ")[2] for line in lines if "without a cache" in line), ""
        )
        if model_type in MULTIMODAL:
            row["carried"] = carried(directory / "model", Path(raw["output"]) / "sft" / "model")
        row["stacked"] = any("none for the stacked" in line for line in lines)
    return {**row, "cpu_s": time.process_time() - began}


ABOUT = """\
Tiny random checkpoints of architectures that ptf does not define, with `model.backend: hf` in fp32 on a CPU.
*Logits*: the largest difference of the loaded model from transformers' own forward pass over each document alone, of
the largest logit. *Leak*: the largest change of one document's logits when the tokens of the others in its batch
change, likewise (rounding where experts sum over all tokens of a batch). SFT and LoRA (rank 4, default targets) are
{steps} steps of learning rate 1e-2 and 3e-2, DPO is {dpo_steps} of 2e-3 (eight of 1e-2 did not lower the loss of six
architectures). Each cell has the mean loss of the last four steps without learning (the same job with a learning rate
of 1e-12; for DPO it is ln 2) and with it; it falls if it is lower by more than 2 %. GRPO is three steps with
`rollout.engine: native`: the largest difference between the engine's log-probs and the trainer's. Of {ran}
architectures that train, the loss falls in {sft} with SFT, {lora} with LoRA and {dpo} with
DPO, and {grpo} run GRPO, {close} of them within 1e-5.

"""
OF_MULTIMODAL = """
Multimodal models, of which the language model trains on text. *Carried*: the tensors of the checkpoint outside it,
which are bit-equal in the export of SFT; then how many of the others that run has changed (tensors that text does not
use, such as keys of layers that share those of others, stay).
"""
NAMES = "architecture | logits | leak | SFT | LoRA | DPO | GRPO | generates"


def words_of(row: Row) -> dict[str, str]:
    """Return the outcomes of the offline jobs of a row in words."""
    return {n: judged(row[n], row["control"]) for n in ("sft", "lora")} | {"dpo": judged(row["dpo"], math.log(2))}


def cells_of(row: Row) -> list[str]:
    of = words_of(row)
    lora = of["lora"] + (" (experts are stacked: no adapter)" if row["stacked"] else "")
    rollouts = row["grpo"] if isinstance(row["grpo"], str) else f"{row['grpo']:.1g}"
    cells = [row["model_type"], f"{row['apart']:.1g}", f"{row['leak']:.1g}", of["sft"], lora, of["dpo"], rollouts]
    cells.append(f"without a cache: {row['uncached']}" if row["uncached"] else "with its cache")
    cells += [row["carried"]] if "carried" in row else []
    return [cell.replace("|", "\\|") for cell in cells]


def page(found: list[Row], place: Path) -> int:
    ran = [row for row in found if "sft" in row]
    words = [words_of(row) for row in ran]
    falls = {name: sum(of[name].startswith("falls") for of in words) for name in ("sft", "lora", "dpo")}
    grpo = [row["grpo"] for row in ran if isinstance(row["grpo"], float)]
    spent = f"; {sum(row.get('cpu_s', 0) for row in found):.0f} s of one core"
    about = head(
        "Architectures of transformers", spent, command="`python benchmarks/hf_backend.py` (`make bench-hf-backend`)"
    )
    about = f"{about.rstrip()}, of the last rows  \nEach row: [hf_backend.jsonl](hf_backend.jsonl)\n\n" + ABOUT.format(
        steps=STEPS, dpo_steps=DPO_STEPS, ran=len(ran), **falls, grpo=len(grpo), close=sum(x <= 1e-5 for x in grpo)
    )
    multimodal = [cells_of(row) for row in ran if "carried" in row]
    lines = [table(NAMES, [cells_of(row) for row in ran if "carried" not in row])]
    lines += [OF_MULTIMODAL, table(f"{NAMES} | carried", multimodal)] if multimodal else []
    rest = [row for row in found if "sft" not in row]
    lines += ["", "Not trained:", ""] if rest else []
    lines += [f"- {row['model_type']}: {row.get('refused') or 'no tiny model: ' + row.get('made', '')}" for row in rest]
    failed = [
        row["model_type"]
        for row in found
        if any(str(row.get(k, "")).startswith("fails") for k in ("sft", "lora", "dpo", "grpo"))
    ]
    return write_page(place, about, lines, failed)


def main() -> int:
    asked = options(__doc__, types=[*TYPES, *MULTIMODAL], minutes=55.0, results=RESULTS)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ledger, ends = asked.results.with_suffix(".jsonl"), time.monotonic() + 60 * asked.minutes
    found = kept(ledger)
    for model_type in asked.types:
        if time.monotonic() > ends:
            break
        if any(row["model_type"] == model_type for row in found):
            continue
        found.append(measured(model_type))
        keep(ledger, found[-1])
        print(json.dumps(found[-1]), flush=True)
    return page(found, asked.results)


if __name__ == "__main__":
    sys.exit(main())
