"""A Ceph RADOS gateway of one's own, on loopback: one monitor, one store in memory, one gateway,
gone with the block that started them."""

import contextlib
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.server_process import free_port
from tests.waiting import until

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
WAIT_S = 120.0
CONF = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon}/0]
public addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
run dir = {at}
admin socket = {at}/$name.asok
log file = {at}/$name.log
mon data = {at}/mon
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 1
mon max pg per osd = 2000
osd data = {at}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd class load list = *
osd class default list = *
osd crush chooseleaf type = 0
osd max object name len = 460
osd max object namespace len = 64
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
[client.rgw]
rgw data = {at}/rgw
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw dns name = localhost
"""


def missing() -> list[str]:
    """Of Ceph's programs, those that this machine has not (Debian: radosgw ceph-mon ceph-osd ceph-common)."""
    return [name for name in PROGRAMS if not shutil.which(name)]


@dataclass
class Gateway:
    """`endpoint` takes S3's requests, signed with the two keys."""

    at: Path
    key: str = "ptf-key"
    secret: str = field(default_factory=lambda: uuid.uuid4().hex)
    ports: tuple[int, int] = (0, 0)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @contextlib.contextmanager
    def running(self) -> Iterator["Gateway"]:
        self.ports = free_port(), free_port()
        for name in ("mon", "osd", "rgw"):
            (self.at / name).mkdir(parents=True)
        fsid, conf = str(uuid.uuid4()), self.at / "ceph.conf"
        conf.write_text(CONF.format(fsid=fsid, at=self.at, mon=self.ports[0], rgw=self.ports[1]))
        with contextlib.ExitStack() as stack:
            monitor = f"[v1:127.0.0.1:{self.ports[0]}/0]"
            self._ran("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor, self.at / "monmap")
            self._ran("ceph-mon", "-c", conf, "-i", "a", "--mkfs", "--monmap", self.at / "monmap")
            self._start(stack, "ceph-mon", "-f", "-c", conf, "-i", "a")
            until(lambda: self._asked("ceph", "-c", conf, "--connect-timeout", "5", "-s"), WAIT_S, 0.3)
            store = str(uuid.uuid4())
            self._ran("ceph", "-c", conf, "osd", "new", store)
            self._ran("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", store)
            objects = [self._start(stack, "ceph-osd", "-f", "-c", conf, "-i", "0")]

            def stores() -> bool:
                if objects[-1].poll() is not None:  # one that asks before it has the monitor's map is refused, and ends
                    objects.append(self._start(stack, "ceph-osd", "-f", "-c", conf, "-i", "0"))
                return self._asked("sh", "-c", f"ceph -c {conf} --connect-timeout 5 osd stat | grep -q '1 up'")

            until(stores, WAIT_S, 0.3)
            self._start(stack, "radosgw", "-f", "-c", conf, "-n", "client.rgw")
            until(self._answers, WAIT_S, 0.3)
            user = "user", "create", "--uid", "ptf", "--display-name", "ptf"
            keys = "--access-key", self.key, "--secret-key", self.secret
            self._ran("radosgw-admin", "-c", conf, "-n", "client.rgw", *user, *keys)
            yield self

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(self.endpoint, timeout=5).status == 200
        except OSError:
            return False

    def _start(self, stack: contextlib.ExitStack, *line: object) -> "subprocess.Popen[bytes]":
        # each has a log file
        process = subprocess.Popen([str(word) for word in line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(ended, process)
        return process

    def _asked(self, *line: object) -> bool:
        return subprocess.run([str(word) for word in line], capture_output=True, timeout=WAIT_S).returncode == 0

    def _ran(self, *line: object) -> None:
        subprocess.run([str(word) for word in line], check=True, capture_output=True, timeout=WAIT_S)


def ended(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
