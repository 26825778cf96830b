"""Silent and slow clients of `--mode=serve`: others are answered, and they are closed."""

import asyncio
import contextlib
import socket
import threading
import time
import types

import pytest
import uvicorn
from starlette.responses import PlainTextResponse, StreamingResponse

from praxis_lite.host.host_names import LOOPBACK_HOSTS
from praxis_tools.serve import connections
from praxis_tools.serve.endpoints import application
from praxis_tools.serve.requests import Limits

HEAD = b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


async def endless():
    while True:
        await asyncio.sleep(0)
        yield bytes(2**16)


async def app(scope, receive, send):
    """Answers at once, after the whole body, never, or without an end."""
    if scope["path"] == "/endless":
        return await StreamingResponse(endless())(scope, receive, send)
    if scope["path"] == "/read":
        while (await receive()).get("more_body"):
            pass
    if scope["path"] == "/late":
        await asyncio.sleep(2)
    return await PlainTextResponse("answer")(scope, receive, send)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(connections, "_LAST_SECONDS", 1.0)
    monkeypatch.setattr(connections, "_CHECK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=connections.limited(0.5, 0.5),
                lifespan="off",
                ws="none",
                log_level="critical",
                timeout_graceful_shutdown=1,
                limit_concurrency=connections.MAX_WAITING_CONNECTIONS + 9,
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        server.port = listening.getsockname()[1]
        yield server
        server.should_exit = True
        thread.join()


def connected(server, data=b""):
    connection = socket.create_connection(("127.0.0.1", server.port), 5)
    connection.sendall(data)
    return connection


def is_answered(server):
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connected(server, request) as connection:
        return b"answer" in b"".join(iter(lambda: connection.recv(65536), b""))


def test_five_hundred_silent_clients_keep_nobody_out(server):
    left_open = [connected(server, (b"", HEAD[:9], HEAD)[k % 3]) for k in range(500)]
    assert is_answered(server)
    for connection in left_open:
        connection.close()


# What a slow client sends at once, and what again and again.
SLOW = {
    "nothing": (b"", b""),
    "a head byte by byte": (HEAD[:-9], b"1"),
    "half a body": (HEAD + b"1234", b""),
    "a body byte by byte": (HEAD.replace(b"9", b"99"), b"1"),
    "a body that no one reads": (HEAD.replace(b"/read", b"/").replace(b"9", b"99"), b"1"),
    "half of a second request": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT", b"T"),
    "a stream that is not taken": (b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "an answer that never comes": (b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n", b""),
}


@pytest.mark.slow
def test_slow_clients_are_closed_at_their_deadlines_and_not_before(server):
    began, seen, seconds = time.monotonic(), set(), {}
    with contextlib.ExitStack() as left_open:
        slow = {
            name: left_open.enter_context(connected(server, data))
            for name, (data, _) in SLOW.items()
        }
        names = {client.getsockname()[1]: name for name, client in slow.items()}
        is_open = True
        while is_open or time.monotonic() - began < 1:
            time.sleep(0.05)
            there = {
                names[item.transport.get_extra_info("peername")[1]]
                for item in list(server.server_state.connections)
            }
            seen |= there
            seconds |= {
                name: time.monotonic() - began for name in seen - there if name not in seconds
            }
            for name in there:
                with contextlib.suppress(OSError):
                    slow[name].send(SLOW[name][1])
            is_open = bool(there)
            assert time.monotonic() - began < 10, there
        assert len(seen) > 4 and min(seconds.values()) > 0.3, seconds
        assert is_answered(server)


@pytest.mark.parametrize(
    "hosts, status",
    [
        (["localhost"], 200),
        ([], 403),
        (["localhost", "evil.com"], 403),
        (["evil.com"], 403),
    ],
)
def test_a_host_header_that_is_not_an_own_name_is_refused(hosts, status):
    model = types.SimpleNamespace(name="toy", max_length=7)
    served = application(
        model, types.SimpleNamespace(is_draining=False), Limits(1.0, None, LOOPBACK_HOSTS)
    )
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/health",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", host.encode()) for host in hosts],
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    asyncio.run(served(scope, receive, send))
    assert messages[0]["status"] == status
