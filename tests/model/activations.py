"""The bytes that a layer keeps for its backward pass, counted by storage on fake tensors: autograd's hooks do not see
what selective recomputation keeps."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ptf.config.sections.compute import MeshSizes
from ptf.model import bridge
from ptf.model.context_parallel import context_parallel
from ptf.model.recompute import Recompute, recompute
from ptf.train.budget import fake_meshes
from tests.gpu_rehearsal.host_syncs import HostSyncs
from tests.train.live_bytes import LiveBytes, as_on_a_gpu, published

LAYERS = 3


def kept(shape: str, tokens: int, ranks: int, mode: Recompute, kv: int) -> float:
    """Return the bytes a layer, in bf16 as on a GPU, of a published shape with `kv` key-value heads and a sequence of
    one document, which so many ranks divide."""
    config = {"num_hidden_layers": LAYERS, "num_key_value_heads": kv}
    with as_on_a_gpu(), fake_meshes(MeshSizes(context=ranks)) as meshes, published(shape, **config) as directory:
        model = bridge.build(directory).to(torch.bfloat16)
        if ranks > 1:
            context_parallel(model, meshes)
        live, after = LiveBytes(), list[int]()
        for block in model.layers:
            if mode != "none":
                recompute(block, mode)
            block.register_forward_hook(lambda *of: after.append(live.now))
        with FakeTensorMode(allow_non_fake_inputs=True), HostSyncs(), live:
            for parameter in model.to_empty(device="cpu").parameters():
                live.see(parameter)
            at = torch.arange(tokens)[None]
            hidden: Any = model(torch.ones_like(at), at, torch.zeros_like(at), lambda x, head: x)
        assert hidden.shape[1] == tokens
    return (after[-1] - after[0]) / (LAYERS - 1)  # what the first layer makes for all is not counted
