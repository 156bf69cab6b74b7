"""What a weight sync moves and how long that takes at least: bytes and seconds by transport and dtype; without torch.

A sync gathers the tensors of a sharded policy and carries them to each engine, over the links that the table of the
transports names. The seconds are those of the slowest link, or of a digest where it is slower, if the parts of a
transfer overlap, and otherwise their sum; a real transfer takes longer.
"""

from dataclasses import dataclass

from ptf.config.transports import TRANSPORTS

WIDTH = {"fp32": 4, "bf16": 2}  # bytes of a weight, by the precision of the engine


# bytes per second of each link: estimates for a machine of eight H100
RATES = {
    "gather": 300e9,  # between the GPUs of a machine (NVLink)
    "device": 2.0e12,  # within the memory of a GPU
    "host_link": 50e9,  # between a GPU and host memory (PCIe 5)
    "host": 10e9,  # a copy within host memory, as into an object store
    "disk": 2e9,  # files that all machines of the job can read
    "digest_on_device": 150e9,  # a checksum that is computed on a GPU: about twenty passes over its memory
    "digest_on_host": 4e9,  # the same on two cores (2 GB/s each, measured)
}


@dataclass(frozen=True)
class SyncTraffic:
    """What one sync moves."""

    sent: int  # bytes of all tensors that are sent, each once
    host: int  # bytes that host memory or files hold at once; 0 if the engines read while the policy sends
    seconds: float  # the least that the sync takes


def sync_traffic(parameters: int, precision: str, transport: str) -> SyncTraffic:
    """Return what a sync of this many weights moves on one machine, by a transport (`rollout.transport`).

    Weights are sent in the precision of the engine. For an adapter, give the number of its weights.
    """
    chosen, sent = TRANSPORTS[transport], parameters * WIDTH[precision]
    seconds = [times * sent / RATES[link] for link, times in chosen.link_crossings.items()]
    # an engine that reads only when everything is stored overlaps with nothing: then the times of both halves add
    return SyncTraffic(sent, 0 if chosen.streams else sent, max(seconds) if chosen.streams else sum(seconds))
