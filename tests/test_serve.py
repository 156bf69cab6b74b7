"""`ptf serve`, the command: its address, its example, and its end."""

import json
import re
import selectors
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from ptf import cli
from tests.serving.serving import chatting

DEADLINE_S = 120.0


def line_of(process: subprocess.Popen, deadline: float) -> str:
    """The next line of a process's output, which is not buffered here, so that the selector sees what is left."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(max(0.0, deadline - time.monotonic())), "no line before the deadline"
    return process.stdout.readline().decode()


@pytest.mark.long
def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "ptf.cli", "serve", str(chatting(tmp_path / "model")), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    try:
        deadline = time.monotonic() + DEADLINE_S
        address, example = line_of(process, deadline), line_of(process, deadline)
        found = re.fullmatch(r"serving model at (http://127\.0\.0\.1:\d+)/v1\n", address)
        assert found is not None, address
        url, body = re.search(r"curl (\S+) -H .* -d '(.*)'", example).groups()
        assert url == f"{found[1]}/v1/chat/completions"
        asked = urllib.request.Request(url, json.dumps({**json.loads(body), "max_tokens": 5}).encode())
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert 1 <= json.load(answer)["usage"]["completion_tokens"] <= 5
        # an answer that is being sampled does not keep the process
        endless = urllib.request.Request(
            url, json.dumps({**json.loads(body), "max_tokens": 900, "stream": True}).encode()
        )
        with urllib.request.urlopen(endless, timeout=30) as answer:
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, b"")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "needs a key; put one into an environment variable and name it with --api-key-env"),
        (["--api-key-env", "PTF_TEST_NO_SUCH_KEY"], "the environment variable PTF_TEST_NO_SUCH_KEY is not set"),
        ([], "there is no directory"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, arguments, message, capsys):
    assert cli.main(["serve", str(tmp_path / "nowhere"), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
