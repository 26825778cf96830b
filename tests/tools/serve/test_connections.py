"""Silent and slow clients of `--mode=serve`: others are answered, and they are closed."""

import asyncio
import contextlib
import itertools
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
        server = uvicorn.Server(uvicorn.Config(
            app, http=connections.limited(0.5, 0.5), lifespan="off", ws="none",
            log_level="critical",
            timeout_graceful_shutdown=1, limit_concurrency=connections.MOST_WAITING + 9,
        ))
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


@pytest.mark.parametrize("data, more", [
    (b"", b""), (HEAD[:-9], b"1"), (HEAD + b"1234", b""), (HEAD.replace(b"9", b"99"), b"1"),
    (HEAD.replace(b"/read", b"/").replace(b"9", b"99"), b"1"),
    (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT", b"T"),
    (b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    (b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n", b""),
], ids=[
    "nothing", "a head byte by byte", "half a body", "a body byte by byte",
    "a body that no one reads", "half of a second request", "a stream that is not taken",
    "an answer that never comes",
])  # fmt: skip
def test_a_slow_client_is_closed_at_its_deadline_and_not_before(server, data, more):
    with connected(server, data) as slow:
        for k in itertools.count():
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                slow.send(more)
            if not server.server_state.connections:
                break
            assert k < 50
        assert k > 2
        assert is_answered(server)


@pytest.mark.parametrize("hosts, status", [
    (["localhost"], 200), ([], 403), (["localhost", "evil.com"], 403), (["evil.com"], 403),
])
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
        "type": "http", "method": "GET", "path": "/health", "query_string": b"", "root_path": "",
        "headers": [(b"host", host.encode()) for host in hosts], "server": ("127.0.0.1", 80),
        "scheme": "http", "http_version": "1.1",
    }
    asyncio.run(served(scope, receive, send))
    assert messages[0]["status"] == status
