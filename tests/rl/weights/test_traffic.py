"""What a sync moves: bytes and seconds by transport and dtype."""

import pytest

from ptf.rl.weights.traffic import Rates, sync_traffic

SIZES = {"8B": 8.19e9, "30B-A3B": 30.5e9, "235B": 235e9}


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("transport", ["object_store", "path", "ipc", "nccl"])
def test_bf16_is_half_of_fp32(model, transport):
    half, whole = (sync_traffic(int(SIZES[model]), precision, transport) for precision in ("bf16", "fp32"))
    assert half.sent == 2 * int(SIZES[model])
    assert (whole.sent, whole.host) == (2 * half.sent, 2 * half.host)
    assert whole.seconds == pytest.approx(2 * half.seconds)


def test_memory_of_the_device_is_faster_than_that_of_the_host_and_files():
    seconds = {name: sync_traffic(int(8e9), "bf16", name).seconds for name in ("ipc", "nccl", "object_store", "path")}
    assert seconds["ipc"] <= seconds["nccl"] < seconds["object_store"] < seconds["path"]
    assert seconds["ipc"] < 1 < seconds["object_store"]


def test_other_machines_are_as_fast_as_the_network():
    near, far = (sync_traffic(int(235e9), "bf16", "nccl", machines=n) for n in (1, 4))
    assert far.seconds == pytest.approx(470e9 / Rates().network)
    assert near.seconds < far.seconds


def test_a_transport_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no such transport: pigeon"):
        sync_traffic(1, "bf16", "pigeon")
