"""A worker of vLLM's server that reads new weights from a file, for peers whose own transport is NCCL.

vLLM imports `FileLoader` by name (`--worker-extension-cls benchmarks.peers.vllm_weights.FileLoader`); a trainer asks
for a load with POST /collective_rpc, whose arguments can only be strings.
"""

from typing import Any

from safetensors.torch import load_file

from ptf.rl.engines.vllm_extension import WeightLoader


class FileLoader(WeightLoader):
    """The methods that the worker gets."""

    def load_from(self: Any, path: str) -> None:
        """Load every tensor of a safetensors file, named as in a Hugging Face checkpoint."""
        self.ptf_load([load_file(path).items()])
