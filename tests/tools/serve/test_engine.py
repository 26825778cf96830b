"""The engine and its limits: who waits, who is refused, who leaves, and how it ends."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.engine import Generation
from praxis_tools.serve.server import bound_socket
from tests.decode.toy_models import num_compiled
from tests.tools.serve.toy_server import (
    NAME,
    TEXT,
    L,
    R,
    decoding,
    model_and_engine,
    serving,
)


class Asked:
    """A generation, and its pieces."""

    def __init__(self, engine, *, ids=(97,), max_tokens=L, cancels=False):
        self.ids, self.last, self.done = [], None, threading.Event()
        self._engine, self._cancels = engine, cancels
        self.generation = Generation(
            np.asarray(ids, np.int32), max_tokens, 0.0, 1.0, 0, 0, 0, 0, self._deliver
        )

    def _deliver(self, piece):
        assert not self.done.is_set(), "a piece behind the last"
        self.ids += piece.ids
        if piece.done:
            self.last = piece
            self.done.set()
        elif self._cancels:
            self._engine.cancel([self.generation])


def submitted(engine, count, **settings):
    asked = [Asked(engine, **settings) for _ in range(count)]
    engine.submit([item.generation for item in asked])
    return asked


def post(url, **settings):
    body = json.dumps({"model": NAME, "prompt": "a", "temperature": 0} | settings).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=30)


def wait_until(holds):
    for _ in range(600):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about within 6 s")


def test_more_answers_than_rows_all_come_and_a_full_queue_refuses_whole_requests():
    model, engine = model_and_engine(max_waiting=4)
    asked = submitted(engine, R + 3)
    full = "[36] answers are waiting.*the limit is 4"
    with pytest.raises(ApiError, match=full) as error:
        engine.submit([Asked(engine).generation] * 2)
    assert error.value.status == 429 and error.value.headers == {"Retry-After": "1"}
    asked += submitted(engine, 1)
    with decoding(engine):
        assert all(item.done.wait(30) for item in asked)
    assert {bytes(item.ids[:-1]).decode() for item in asked} == {TEXT[1:]}
    assert (engine.num_prompts, engine.num_tokens) == (R + 4, (R + 4) * len(TEXT.encode()))
    with pytest.raises(ApiError) as error:
        engine.submit([Asked(engine).generation])
    assert error.value.status == 503


def test_nothing_compiles_once_the_port_is_open():
    model, engine = model_and_engine()
    num_compiled()
    with decoding(engine):
        before = num_compiled()
        for length in (1, 31, 32, 33, L - 1):
            asked = submitted(engine, R + 1, ids=(200,) * length, max_tokens=3)
            assert all(item.done.wait(30) for item in asked)
            assert len(asked[0].ids) == min(3, L - length)
        assert num_compiled() == before


def test_who_leaves_frees_the_row_and_the_place_in_the_queue():
    model, engine = model_and_engine(max_waiting=4)
    leaving = submitted(engine, R, ids=(200,), cancels=True)  # No end of the text is near.
    staying = submitted(engine, 2)
    gone = submitted(engine, 1)
    engine.cancel([gone[0].generation])
    assert engine.num_waiting == R + 2
    with decoding(engine):
        assert all(item.done.wait(30) for item in staying)
        wait_until(lambda: engine.num_in_rows == 0)
    assert not any(item.done.is_set() for item in leaving) and not gone[0].ids
    assert all(0 < len(item.ids) < L // 2 for item in leaving)


def test_what_does_not_end_in_time_gets_an_error_as_the_last_piece():
    model, engine = model_and_engine()
    asked = submitted(engine, R + 1)
    engine.drain(0)
    engine.run()
    assert [item.last.error.status for item in asked] == [503] * (R + 1)


def test_a_failure_of_the_devices_reaches_every_client_and_the_caller(monkeypatch):
    model, engine = model_and_engine()
    asked = submitted(engine, R + 1)
    monkeypatch.setattr(engine._rows, "advance", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert [item.last.error.status for item in asked] == [500] * (R + 1)


def test_limits_as_a_client_sees_them():
    model, engine = model_and_engine(max_waiting=1)
    given = {"seconds": 0.3, "api_key": "secret", "hosts": frozenset({"127.0.0.1"})}
    with serving(engine, model, **given) as running:

        def answer(url=running.url, key="secret", **settings):
            body = json.dumps({"model": NAME, "prompt": "a", "n": 1} | settings).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, timeout=30)
            error.value.close()
            return error.value

        assert answer(key="another").code == 401
        assert answer(url=running.url.replace("127.0.0.1", "localhost")).code == 403
        full = answer(n=R + 2)
        assert (full.code, full.headers["Retry-After"]) == (429, "1")
        # Nobody decodes: its time is up in the queue, which it leaves, streamed or not.
        assert answer(n=R + 1).code == 504
        assert answer(stream=True).code == 504
        assert engine.num_waiting == 0
        # A client that hangs up leaves the queue as well.
        request = b'{"model": "toy", "prompt": "a", "n": 3}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(request)
        )
        port = int(running.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head + request)
            wait_until(lambda: engine.num_waiting == 3)
        wait_until(lambda: engine.num_waiting == 0)
        engine.drain(1)
        assert answer().code == 503
        with pytest.raises(urllib.error.HTTPError, match="503") as error:
            urllib.request.urlopen(f"{running.url}/health")
        error.value.close()


def test_a_streaming_client_that_leaves_frees_its_row():
    model, engine = model_and_engine()
    with serving(engine, model) as running:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(
                post(running.url, prompt=[200], stream=True, max_tokens=L - 1)
            )
        )
        thread.start()
        wait_until(lambda: engine.num_waiting == 1)
        # The engine turns by hand, so that the client leaves in the middle.
        engine._decode_steps()
        thread.join()
        answers[0].readline()
        answers[0].close()
        wait_until(lambda: engine._cancelled)
        assert engine.num_in_rows == 1
        engine._decode_steps()
        assert engine.num_in_rows == 0 and engine.num_tokens < 10


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port} cannot be opened"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--port is 70000"):
        bound_socket("127.0.0.1", 70000)
