"""A run with kernels of other packages (stand-ins, on a CPU): it learns the same, says what it computes with, and does
not continue without them."""

from pathlib import Path

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.errors import UserError
from ptf.model.kernels import choice
from ptf.run import run
from ptf.storage import file_verification
from tests.model import stand_ins
from tests.tiny import arithmetic

BOTH = {"flash_attn": "2.8.4", "liger_kernel": "0.8.2"}


def trained(raw: dict, name: str) -> list[float]:
    directory = run(loads(yaml.safe_dump(raw)), name)
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


def test_a_run_names_its_kernels_and_does_not_go_on_without_them(tmp_path: Path, monkeypatch, capsys) -> None:
    raw = arithmetic(tmp_path)
    raw["train"]["steps"], raw["checkpoint"] = 3, {"every": 2}
    plain = trained(raw, "plain")
    assert "attention=SDPA per document" in capsys.readouterr().out
    stand_ins.installed(monkeypatch)
    monkeypatch.setattr(choice, "packages_of", lambda setting, device, precision: BOTH if setting == "auto" else {})
    assert trained(raw, "fused") == pytest.approx(plain, rel=1e-4)
    said = capsys.readouterr().out
    assert "attention=flash_attn 2.8.4 (" in said
    assert "norms and rotary not compiled, gates by liger_kernel 0.8.2" in said
    checkpoints = Path(raw["output"]) / "fused" / "checkpoints"
    newest = sorted(path for path in checkpoints.iterdir() if path.is_dir())[-1]
    packages = file_verification.verify(str(newest))["made_with"]["packages"]
    assert packages.items() >= BOTH.items()
    monkeypatch.setattr(choice, "packages_of", lambda *_: {})
    with pytest.raises(UserError, match=r"flash_attn was 2\.8\.4, is not used; liger_kernel was 0\.8\.2, is not used"):
        trained(raw, "fused")
    monkeypatch.setattr(choice, "packages_of", lambda *_: BOTH)
    with pytest.raises(UserError, match=r"flash_attn was not used, is 2\.8\.4"):
        trained(raw, "plain")
    raw["train"]["fused"] = []
    with pytest.raises(UserError, match=r"train\.fused"):  # a fixed key
        trained(raw, "fused")
