"""The table of the transports is the one that configs choose from, and asks for what each needs."""

import sys
from subprocess import run
from typing import get_args

from ptf.config.sections.rollout import RolloutConfig
from ptf.rl.weights.transports import TRANSPORTS


def test_a_config_can_name_each_transport_and_no_other():
    assert set(get_args(RolloutConfig.model_fields["transport"].annotation)) == set(TRANSPORTS)


def test_only_what_is_not_streamed_is_written_to_files():
    assert {name for name, transport in TRANSPORTS.items() if transport.streams} == {"ipc", "nccl"}
    assert not any(transport.streams and transport.in_files for transport in TRANSPORTS.values())


def test_a_config_is_checked_without_torch():
    code = "import sys; import ptf.rl.weights.transports; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
