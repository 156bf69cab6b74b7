"""How the kernels are compiled, kept and loaded, and what a machine without a compiler does."""

import copy
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ptf.errors import UserError
from ptf.model.cpu_kernels import library as place
from ptf.model.cpu_kernels.library import Unavailable, find, library
from ptf.model.fused import attention_of, kernels, use
from tests.model.test_attention import model_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PTF_CACHE", str(tmp_path))
    find.cache_clear()
    yield
    find.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cpu_kernels").iterdir())


def test_a_library_is_compiled_once_and_a_damaged_one_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    (file,) = kept(tmp_path)
    find.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(place, "_compiled", None)  # it would raise
        library()
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[: len(whole) // 2])
    find.cache_clear()
    assert library().width in (4, 8, 16)
    assert sorted(map(len, (other.read_bytes() for other in kept(tmp_path)))) == [len(whole)]


def test_other_flags_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    find.cache_clear()
    monkeypatch.setattr(place, "FLAGS", (*place.FLAGS, "-DOTHER"))
    library()
    assert len(kept(tmp_path)) == 2


def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from ptf.model.cpu_kernels.library import library; print(library().version)"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0].strip() for process in running]
    assert said[0] == said[1] != ""
    assert all(file.suffix == ".so" for file in kept(tmp_path))


SLOW = """#!/bin/sh
[ "$1" = --version ] && exec c++ --version
mktemp && touch "$STARTED" && exec sleep 60
"""  # a compiler that has written a temporary file


def test_a_process_that_is_killed_while_it_compiles_leaves_nothing(tmp_path: Path) -> None:
    compiler, temporary, started = tmp_path / "slow", tmp_path / "temporary", tmp_path / "started"
    compiler.write_text(SLOW)
    compiler.chmod(0o700)
    temporary.mkdir()
    command = [sys.executable, "-c", "from ptf.model.cpu_kernels.library import library; library()"]
    named = {"CXX": str(compiler), "TMPDIR": str(temporary), "STARTED": str(started)}
    process = subprocess.Popen(command, env={**os.environ, **named}, start_new_session=True)
    ends = time.monotonic() + 120
    while not started.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert started.exists(), "it has not begun"
    assert len(kept(tmp_path)) == 1
    library()
    assert [file.suffix for file in kept(tmp_path)] == [".so"]
    assert not list(temporary.iterdir())


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("PTF_CACHE", str(file))
    assert library().width in (4, 8, 16)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler", "is not installed, a C\\+\\+ compiler"), ("false", "failed"), ("true", "wrote no library")],
)
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, compiler: str, said: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(Unavailable, match=said):
        library()
    assert kernels("auto", CPU, "fp32") == {}
    with pytest.raises(UserError, match=r"train.fused: cpu_kernels cannot be used: .*`auto` leaves it out"):
        kernels(["cpu_kernels"], CPU, "fp32")
    assert "SDPA per document (no cpu_kernels: " in attention_of(model_of("qwen3"), CPU)


def test_a_compiler_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -DWITH_AN_ARGUMENT")
    assert library().width in (4, 8, 16)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the arguments are those of x86")
@pytest.mark.parametrize("without", ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_older_processors(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """The other tests of kernels pass with what is compiled for processors that have less."""
    monkeypatch.setenv("CXX", f"c++ {without}")
    others = sorted(str(file) for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *others],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("-r" if flag == "-shared" else flag for flag in place.FLAGS)  # a linked object is no library
    monkeypatch.setattr(place, "FLAGS", tuple(flags))
    with pytest.raises(Unavailable, match="could not be written or loaded"):
        library()
    assert kernels("auto", CPU, "fp32") == {}


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "cpu_kernels"
    folder.mkdir()
    folder.chmod(0o777)
    library()
    assert not kept(tmp_path)
    assert "other users can write" in capsys.readouterr().out


def test_nothing_is_compiled_that_was_not_asked_for(tmp_path: Path) -> None:
    assert kernels([], CPU, "fp32") == {}
    assert attention_of(model_of("qwen3"), CPU) == "SDPA per document"
    assert place.loaded() is None
    assert not (tmp_path / "cpu_kernels").exists()


def test_a_compiler_that_finds_an_error_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("int f() { return nothing; }")
    monkeypatch.setattr(place, "SOURCES", (wrong,))
    with pytest.raises(Unavailable, match=r"failed: .*nothing.* was not declared|failed: .*undeclared"):
        library()


def test_the_kernels_are_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="it computes on a CPU, and this run on cuda"):
        kernels(["cpu_kernels"], torch.device("cuda"), "bf16")
    assert kernels(["cpu_kernels"], CPU, "bf16") == kernels("auto", CPU, "fp32") == {"cpu_kernels": library().version}
    assert kernels([], CPU, "fp32") == {}


def test_a_model_says_which_attention_it_uses() -> None:
    model = copy.deepcopy(model_of("qwen3"))
    assert attention_of(model, CPU) == "SDPA per document"
    use(model, kernels("auto", CPU, "fp32"))
    said = attention_of(model, CPU)
    fits = model.config.head_dim % library().width == 0
    assert said.startswith("cpu_kernels (" if fits else "SDPA per document (not cpu_kernels (")
