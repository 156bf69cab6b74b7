"""What vLLM expects of a sync is what the policy sends, also where the checkpoint stores something else."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptf.model import bridge, model_files
from ptf.model.tensor_files import TensorFiles
from ptf.rl.engines.stepper import Stepper
from ptf.rl.engines.vllm_engine import VLLMEngine, never_sent, unquantised
from ptf.rl.engines.vllm_extension import forget_kernels_of_experts, refusing_lost_weights
from ptf.rl.weights.verification import SyncError, manifest_of
from tests.child import run_python
from tests.model.published import fused_checkpoint, multimodal_checkpoint, mxfp4_checkpoint
from tests.tiny import checkpoint


@pytest.fixture(
    params=["gpt_oss in MXFP4", "multimodal gemma3", "multimodal mistral3", "phi3, fused", "qwen3", "qwen3, tied"]
)
def directory(request, tmp_path) -> Path:
    path = tmp_path / "m"
    if request.param == "gpt_oss in MXFP4":
        mxfp4_checkpoint(path)
    elif request.param.startswith("multimodal"):
        multimodal_checkpoint(path, request.param.split()[1])
    elif request.param == "phi3, fused":
        fused_checkpoint(path)
    else:
        checkpoint(path, tied="tied" in request.param)
    return path


def sent(directory: Path) -> set[str]:
    """The names that a policy sends that was loaded from a checkpoint."""
    model = bridge.load(directory)
    return {name for name, _ in model.hf_tensors()}


def test_what_the_policy_sends_is_expected(directory):
    assert bridge.build(directory, head="lm").hf_names() == sent(directory)


def test_what_is_missing_or_of_another_model_is_a_fault():
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.names, engine.version, engine.stepper = {"a", "b"}, 3, Stepper(engine)
    for names, different in (("a", "b"), ("abc", "c")):
        buckets = [[(name, torch.zeros(1)) for name in names]]
        with pytest.raises(SyncError, match=rf"other tensors than were sent, they differ in \['{different}'\]"):
            engine.load_weights(buckets, manifest_of(buckets, 4))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_vision_tower_is_never_sent_whatever_its_prefix(tmp_path, prefix):
    """A published checkpoint has either; vLLM may not discard it."""
    file = multimodal_checkpoint(tmp_path) / "model.safetensors"
    tensors = {name.removeprefix("model."): t for name, t in load_file(file).items() if "vision_tower" in name}
    rest = {name: t for name, t in load_file(file).items() if "vision_tower" not in name}
    rotations = {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}  # of no weight
    save_file({**rest, **rotations, **{prefix + name: t for name, t in tensors.items()}}, file, {"format": "pt"})
    found = never_sent(bridge.build(tmp_path, head="lm"), tmp_path)
    assert {name for name in found if "vision_tower" in name} == set(tensors)
    assert not any("inv_freq" in name for name in found)


def test_the_checkpoint_of_these_forms_stores_other_names(tmp_path):
    mxfp4_checkpoint(tmp_path / "a")
    multimodal_checkpoint(tmp_path / "b")
    for directory in (tmp_path / "a", tmp_path / "b"):
        with TensorFiles(directory) as files:
            assert set(files.where) != sent(directory)


def test_a_quantised_model_whose_weights_are_replaced_is_made_without_the_quantisation(tmp_path):
    mxfp4_checkpoint(tmp_path / "a")
    arguments = unquantised(tmp_path / "a", tmp_path / "b" / "model")
    assert arguments == {"model": str(tmp_path / "b" / "model"), "load_format": "dummy"}
    written = json.loads((tmp_path / "b" / "model" / "config.json").read_text())
    whole = model_files.read_config(tmp_path / "a")
    assert whole == written | {"quantization_config": whole["quantization_config"]}
    assert "quantization_config" not in written


SHARES = """
import os, signal, sys
from multiprocessing import shared_memory
from ptf.rl.engines.shared_memory import unlink_shared_memory
memory = shared_memory.SharedMemory(create=True, size=1 << 16)
memory.buf[:2] = b"ab"
removed = unlink_shared_memory([os.getpid(), 0]) if sys.argv[1] == "unlinked" else []
assert bytes(memory.buf[:2]) == b"ab"
print(memory.name, removed == [memory.name], flush=True)
if sys.argv[2] == "killed":
    os.killpg(0, signal.SIGKILL)  # its resource tracker, too
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no directory here")
@pytest.mark.parametrize("end", ["killed", "ended"])
def test_shared_memory_without_a_name_outlives_nobody(end: str) -> None:
    for how in ("unlinked", "named"):
        done = run_python("-c", SHARES, how, end, start_new_session=True, timeout=60)
        name, unlinked = done.stdout.split()
        left = Path("/dev/shm") / name
        if how == "unlinked":
            assert unlinked == "True"
            assert not left.exists()
            assert not done.stderr, "its resource tracker knows of nothing"
        else:
            assert left.exists() == (end == "killed")  # control
            left.unlink(missing_ok=True)


PROGRESS = """
import multiprocessing, os, signal, sys
multiprocessing.set_start_method("spawn")  # as vLLM's worker processes are started: semaphores keep their names
if sys.argv[1] == "extension":
    import ptf.rl.engines.vllm_extension
from tqdm import tqdm
list(tqdm([0], disable=True))
lock = getattr(tqdm.get_lock(), "mp_lock", None)
print(lock._semlock.name[1:] if lock else "none", flush=True)
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no directory here")
def test_a_worker_process_that_is_killed_leaves_no_semaphore_of_its_progress_bars() -> None:
    names = [
        run_python("-c", PROGRESS, how, start_new_session=True, timeout=60).stdout.strip()
        for how in ("extension", "control")
    ]
    assert names[0] == "none"
    left = Path("/dev/shm") / f"sem.{names[1]}"
    assert left.exists()
    left.unlink()


class Layer(torch.nn.Module):
    """A layer whose loader may be called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, device="meta"))


def test_what_a_model_copies_without_a_loader_is_an_error(monkeypatch):
    """As gpt-oss does; vLLM's reload then restores the old values."""
    calls: dict[torch.nn.Module, list[tuple[str, None]]] = {}
    layerwise = types.SimpleNamespace(
        get_layerwise_info=lambda layer: types.SimpleNamespace(loaded_weights=calls[layer], load_numel=0)
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload.layerwise", layerwise)
    model = torch.nn.ModuleDict({"called": Layer(), "lost": Layer(), "processed": Layer(), "not_sent": Layer()})
    model["processed"].weight = torch.nn.Parameter(torch.zeros(4))
    calls.update({layer: [("weight", None)] * (name == "called") for name, layer in model.items()})
    calls[model] = []
    model.load_weights = lambda weights: {f"{name}.weight" for name in weights}
    said = r"cannot replace weights of ModuleDict: 1 parameters .*'lost\.weight'"
    with pytest.raises(SyncError, match=said), refusing_lost_weights(model):
        model.load_weights(["called", "lost", "processed"])


def test_a_reload_makes_the_kernels_of_experts_anew():
    """With its first kernel, vLLM's CPU build does not pack the weights that come later."""
    model = torch.nn.ModuleDict({"experts": torch.nn.Module(), "dense": torch.nn.Module(), "bare": torch.nn.Module()})
    model["experts"].quant_method = types.SimpleNamespace(moe_kernel="packs once")
    model["dense"].quant_method = types.SimpleNamespace()
    forget_kernels_of_experts(model)
    assert model["experts"].quant_method.moe_kernel is None
    assert not vars(model["dense"].quant_method)
