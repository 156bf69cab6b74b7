"""Pushing a version to a hub: the client's real requests, to a server on loopback."""

import base64
import functools
import json
from collections.abc import Iterator

import huggingface_hub
import pytest
from huggingface_hub import constants

from ptf.errors import UserError
from ptf.publish.publishing import push
from tests import loopback
from tests.loopback import Loopback, running


class Hub(Loopback):
    """Takes commits of small files. `held`: what was committed; `refuses`: every request is answered with 403."""

    def __init__(self) -> None:
        super().__init__(Answers)
        self.held: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.made: list[dict] = []
        self.refuses = False


class Answers(loopback.Answers):
    server: Hub  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses:
            return self.answer({"error": "this token may not write here"}, 403)
        if self.path.endswith("/repos/create"):
            self.server.made.append(json.loads(body))
            return self.answer({"url": f"{constants.ENDPOINT}/team/name", "name": "team/name"})
        if "/preupload/" in self.path:
            paths = [one["path"] for one in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self.answer({"files": files})
        if self.path.endswith("/validate-yaml"):
            return self.answer({"errors": [], "warnings": []})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.server.messages.append(line["value"]["summary"])
            elif line["key"] == "deletedFile":
                del self.server.held[line["value"]["path"]]
            elif line["key"] == "file":
                self.server.held[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer({"commitUrl": f"{constants.ENDPOINT}/team/name/commit/{'a' * 40}", "commitOid": "a" * 40})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            sizes = {name: len(data) for name, data in self.server.held.items()}
            about = {"type": "file", "oid": "b" * 40}
            return self.answer([{**about, "path": name, "size": size} for name, size in sizes.items()])
        return self.answer({"error": "no such repository"}, 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(Hub()) as hub:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # it has a log below HOME
        monkeypatch.setattr(
            huggingface_hub, "HfApi", functools.partial(huggingface_hub.HfApi, endpoint=hub.url, token="hf_secret")
        )
        yield hub


@pytest.fixture
def version(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "config.json").write_text("{}")
    (tmp_path / "v1" / "README.md").write_text("# v1\n")
    return tmp_path / "v1"


def test_every_file_is_in_one_commit_of_a_private_repository(hub, version, capsys):
    hub.held["model-00001-of-00002.safetensors"] = b"of the version before"
    push(version, "team/name", "v1")
    assert hub.held == {"config.json": b"{}", "README.md": b"# v1\n"}
    assert hub.messages == ["v1"]
    assert hub.made[0]["visibility"] == "private"
    assert f"pushed to {constants.ENDPOINT}/team/name/commit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "repository"), [("refuses", "team/name"), ("gone", "team/name"), ("", "not a/good name/")]
)
def test_a_hub_that_does_not_take_it_is_one_message(hub, version, monkeypatch, fault, repository):
    if fault == "gone":
        nowhere = {"endpoint": "http://127.0.0.1:9", "token": "hf_secret"}
        monkeypatch.setattr(huggingface_hub, "HfApi", functools.partial(huggingface_hub.HfApi.func, **nowhere))
    hub.refuses = fault == "refuses"
    with pytest.raises(UserError, match=r"v1 is published, but not on the hub: .*") as error:
        push(version, repository, "v1")
    assert "hf_secret" not in str(error.value)
    assert not hub.held
