"""What a sync moves: bytes and seconds by transport and dtype."""

import pytest

from ptf.config.transports import TRANSPORTS
from ptf.rl.online_budget import RATES, sync_traffic

SIZES = {"8B": 8.19e9, "30B-A3B": 30.5e9, "235B": 235e9}


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bf16_is_half_of_fp32(model, transport):
    half, whole = (sync_traffic(int(SIZES[model]), precision, transport) for precision in ("bf16", "fp32"))
    assert half.sent == 2 * int(SIZES[model])
    assert (whole.sent, whole.host) == (2 * half.sent, 2 * half.host)
    assert whole.seconds == pytest.approx(2 * half.seconds)


def test_memory_of_the_device_is_faster_than_that_of_the_host_and_files():
    seconds = {name: sync_traffic(int(8e9), "bf16", name).seconds for name in ("ipc", "nccl", "object_store", "files")}
    assert seconds["ipc"] <= seconds["nccl"] < seconds["object_store"] < seconds["files"]
    assert seconds["ipc"] < 1 < seconds["object_store"]


def test_the_parts_of_a_streamed_transfer_overlap_and_those_of_a_stored_one_add_up():
    sent = 16e9
    # without what carries the bytes: the policy's digests are computed on its GPU, the engine's on the host
    sides = 2 * sent / RATES["host_link"] + sent / RATES["digest_on_device"] + sent / RATES["digest_on_host"]
    seconds = {
        "ipc": max(sent / RATES["gather"], 2 * sent / RATES["device"], 2 * sent / RATES["digest_on_device"]),
        "nccl": max(sent / RATES["gather"], 2 * sent / RATES["digest_on_device"]),
        "object_store": sent / RATES["gather"] + sides + 2 * sent / RATES["host"],
        "files": sent / RATES["gather"] + sides + 2 * sent / RATES["disk"],
    }
    for name, expected in seconds.items():
        found = sync_traffic(int(8e9), "bf16", name)
        assert found.seconds == pytest.approx(expected, rel=1e-12)
        assert found.host == (0 if TRANSPORTS[name].streams else sent)
    assert seconds.keys() == TRANSPORTS.keys()
