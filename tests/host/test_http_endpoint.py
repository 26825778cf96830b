"""The small HTTP server: who may ask, and that no client keeps others out."""

import contextlib
import socket
import threading
import time

import pytest

from praxis_lite.host import http_endpoint
from praxis_lite.host.http_endpoint import LOOPBACK_HOSTS, HttpEndpoint, asks_for

OWN = ("localhost", "LocalHost", "localhost:80", "127.0.0.1", "127.0.0.1:65535", "[::1]",
       "[::1]:8000", "[0:0:0:0:0:0:0:1]", " localhost ")  # fmt: skip
FOREIGN = (
    "", " ", "evil.com", "127.0.0.1.evil.com", "localhost.evil.com", "evil.com:80", "localhost.",
    "127.0.0.1.", "127.1", "2130706433", "0x7f.0.0.1", "127.0.0.01", "10.0.0.1", "0.0.0.0",
    "localhost:", "localhost:abc", "localhost:-1", "localhost:65536", "localhost:80:80",
    "localhost:\uff18\uff10", "localhost@evil.com", "evil.com@localhost", "user:key@localhost",
    "localhost/", "localhost/@evil.com", "localhost#", "localhost?x", "localhost,evil.com",
    "localhost evil.com", "local\thost", "localhost\\evil.com", "http://localhost", "//localhost",
    "[::1", "::1", "[::1]x", "[::1]:", "[::1%25lo]", "[::1%lo]", "[::]", "[]", "[localhost]",
    "[127.0.0.1]", "[::ffff:127.0.0.1]", "\u24dbocalhost", "loc\u0430lhost", "xn--loclhost-6fg",
    "%6cocalhost", "localhost\0", "*",
)


@pytest.mark.parametrize("hosts, expected", [
    *(([host], True) for host in OWN), *(([host], False) for host in FOREIGN),
    ([], False), (["localhost", "localhost"], False), (["localhost", "evil.com"], False),
])  # fmt: skip
def test_only_one_host_header_that_is_exactly_an_own_name_counts(hosts, expected):
    assert asks_for(hosts, LOOPBACK_HOSTS) is expected


@pytest.fixture
def endpoint():
    endpoint = HttpEndpoint("127.0.0.1", 0, lambda path: (200, "text/plain", path.encode()))
    yield endpoint
    endpoint.close()


def asked(endpoint, data):
    with socket.create_connection(("127.0.0.1", endpoint.port), 5) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def get(endpoint, *fields, line="GET /a?b HTTP/1.0"):
    return asked(endpoint, "\r\n".join((line, *fields, "", "")).encode())


@pytest.mark.parametrize("line, fields, status", [
    ("GET /a?b HTTP/1.0", ["Host: localhost"], 200), ("GET /a?b HTTP/1.1", ["hOST:[::1]:9"], 200),
    ("GET /a HTTP/1.1", ["Host: evil.com"], 403), ("GET /a HTTP/1.1", ["Host : localhost"], 403),
    ("GET /a?b HTTP/1.1", ["Host: localhost", "host: evil.com"], 403),
    ("GET http://localhost/a HTTP/1.1", ["Host: evil.com"], 403), ("GET /a HTTP/1.0", [], 403),
    ("POST /a HTTP/1.1", ["Host: localhost"], 405), ("GET /a HTTP/9.9", ["Host: localhost"], 400),
    ("GET", [], 400), ("", ["x"], 400), ("GET /a HTTP/1.1", ["X: " + "a" * 20_000], 431),
])  # fmt: skip
def test_a_request_gets_a_status(endpoint, line, fields, status):
    answer = get(endpoint, *fields, line=line)
    assert answer.startswith(f"HTTP/1.0 {status} ".encode()), answer
    assert answer.endswith(b"\r\n\r\n/a") == (status == 200)


def test_an_endpoint_that_other_machines_reach_answers_to_its_address_and_name_too():
    endpoint = HttpEndpoint("0.0.0.0", 0, lambda path: (200, "text/plain", b"yes"))
    try:
        for host in (socket.gethostname(), "127.0.0.1", "localhost"):
            assert get(endpoint, f"Host: {host}:9").endswith(b"yes")
        assert b"403" in get(endpoint, "Host: evil.com")
    finally:
        endpoint.close()


def test_slow_clients_keep_nobody_out_and_are_closed(endpoint, monkeypatch):
    monkeypatch.setattr(http_endpoint, "_SECONDS", 1.0)
    num_threads, left_open = threading.active_count(), []
    for _ in range(5 * http_endpoint._MOST_CONNECTIONS):
        left_open.append(socket.create_connection(("127.0.0.1", endpoint.port), 5))
        left_open[-1].sendall(b"GET /a HTTP/1.0\r\nX: ")
    assert get(endpoint, "Host: localhost").endswith(b"/a")
    assert len(endpoint._open) <= http_endpoint._MOST_CONNECTIONS
    deadline = time.monotonic() + 5
    while endpoint._open:  # Though each sends a byte now and then.
        assert time.monotonic() < deadline
        for connection in left_open:
            with contextlib.suppress(OSError):
                connection.sendall(b"y")
        time.sleep(0.1)
    assert threading.active_count() == num_threads
    for connection in left_open:
        connection.close()


def test_a_client_that_does_not_take_its_answer_is_closed(monkeypatch):
    monkeypatch.setattr(http_endpoint, "_SECONDS", 0.5)
    endpoint = HttpEndpoint("127.0.0.1", 0, lambda path: (200, "text/plain", bytes(2**26)))
    with socket.create_connection(("127.0.0.1", endpoint.port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        assert len(endpoint._open) == 1
        time.sleep(1.0)
        assert not endpoint._open
    endpoint.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", endpoint.port), 5).close()
