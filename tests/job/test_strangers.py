"""A stranger who reaches the coordination port of a job reads, writes and ends nothing."""

import concurrent.futures
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from praxis_lite.host.object_stores import StorePath
from praxis_lite.job.processes import addresses, coordinator_gate
from tests.support import coordinated
from tests.support.fake_s3 import s3_bucket
from tests.support.job_runs import CHECKOUT
from tests.support.process_pairs import free_port


def started(*argv):
    return subprocess.Popen(
        [sys.executable, coordinated.__file__, *map(str, argv)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    )


def until_connected(process):
    for line in process.stderr:
        if line.rstrip().endswith("connected"):
            return
    raise AssertionError(process.stdout.read())


def listening(port):
    """Returns the addresses, as /proc has them, on which something listens at a port."""
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in text.splitlines()]
    return {
        line[1].rpartition(":")[0]
        for line in lines
        if line[1].endswith(f":{port:04X}") and line[3] == "0A"
    }


@pytest.mark.slow
def test_a_stranger_reads_writes_and_ends_nothing(tmp_path):
    with s3_bucket() as bucket:
        cases = [
            ("plain", "localhost"),
            ("elastic", "127.0.0.1"),
            # With 0.0.0.0 the user asks for all interfaces.
            ("plain", "0.0.0.0", tmp_path / "job"),
            ("plain", "0.0.0.0", StorePath.opened(f"{bucket}/job")),
        ]
        # At once: mostly a stranger waits for answers that do not come.
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            for done in [pool.submit(check_stranger, *case) for case in cases]:
                done.result()


def check_stranger(kind, host, *folder):
    port = free_port()
    jobs = [started(kind, f"{host}:{port}", k, *folder) for k in (0, 1)]
    try:
        for process in jobs:
            until_connected(process)
        assert listening(port) == {"00000000" if host == "0.0.0.0" else "0100007F"}
        with started("stranger", f"127.0.0.1:{port}", 1) as stranger:
            assert stranger.communicate(timeout=60)[0] == ""
        for connection in [socket.create_connection(("127.0.0.1", port), 5) for _ in range(99)]:
            connection.close()
        for process in reversed(jobs):  # The first has the service, and is the last to end.
            assert process.poll() is None
            assert process.communicate("\n", timeout=30)[1].strip().endswith("the job's")
            assert process.returncode == 0
        assert not folder or not folder[0].exists()
    finally:
        for process in jobs:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("coordinator, expected", [
    ("127.0.0.1:7", ("127.0.0.1", 7)), ("localhost:7", ("127.0.0.1", 7)),
    ("[::1]:7", ("::1", 7)), ("0.0.0.0:7", ("0.0.0.0", 7)), ("[::]:7", ("::", 7)),
])  # fmt: skip
def test_the_coordinator_listens_on_its_own_address(coordinator, expected):
    assert addresses.to_bind(coordinator) == expected
    assert addresses.parse_address(addresses.format_address(*expected)) == expected


@pytest.mark.parametrize("coordinator, names, own, bind, reach", [
    # By its name in the network.
    ("first:7", {"first": "10.0.0.5"}, "10.0.0.5", "10.0.0.5", "first"),
    # As another host sees it, or through an address that is no host's, as a service of Kubernetes.
    ("first:7", {"first": "10.0.0.5"}, "10.0.0.6", "10.0.0.6", "first"),
    # A host that takes its own name for loopback, as Debian does.
    ("first:7", {"first": "127.0.1.1"}, "10.0.0.5", "10.0.0.5", "10.0.0.5"),
    # A name that has no address yet.
    ("pod-0.train:7", {}, "10.4.0.7", "10.4.0.7", "pod-0.train"),
    ("[fd00::5]:7", {}, "fd00::5", "fd00::5", "fd00::5"),
])  # fmt: skip
def test_the_coordinator_is_reached_where_it_listens(
    monkeypatch, coordinator, names, own, bind, reach
):
    """Of a network that is pretended: names with their addresses, and this host's own address."""

    class Socket(socket.socket):
        def connect(self, target):
            self.target = target[0]

        def getsockname(self):
            return "127.0.0.1" if self.target.startswith("127.") else own, 0

    def getaddrinfo(host, port, **_):
        address = names.get(host, host)
        if address == socket.gethostname() or not (address[0].isdecimal() or ":" in address):
            raise socket.gaierror(-2, "Name or service not known")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(family, socket.SOCK_DGRAM, 0, "", (address, port))]

    monkeypatch.setattr(addresses.socket, "socket", Socket)
    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    assert addresses.to_bind(coordinator) == (bind, 7)
    assert addresses.to_reach(coordinator) == (reach, 7)


def test_the_key_is_its_users_alone(tmp_path):
    file = tmp_path / "new" / "job" / "key"
    coordinator_gate._write_key(file, b"one")
    coordinator_gate._write_key(file, b"another")
    assert bytes.fromhex(file.read_text()) == b"another"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["key"]
    assert stat.S_IMODE(coordinator_gate.user_folder().stat().st_mode) == 0o700
