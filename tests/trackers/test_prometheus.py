"""Prometheus' text format, read back by its own client; the file, and the port."""

import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from praxis_lite import ConfigError, PrometheusTextfile
from praxis_lite.trackers.metrics_endpoint import MAX_CONNECTIONS, MetricsEndpoint
from praxis_lite.trackers.prometheus import LatestMetrics
from tests.support.tracked_runs import run_in


def samples(text):
    """Returns {(name, dataset): value} of a text, whose labels name the run."""
    values = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        for sample in family.samples:
            assert sample.labels["run"] == "job" and sample.labels["experiment"] == "zoo.Tiny"
            key = (sample.name.removeprefix("praxis_lite_"), sample.labels.get("dataset"))
            values[key] = sample.value
    return values


def test_the_text_has_the_newest_numbers_of_training_and_of_evaluations(tmp_path):
    numbers = LatestMetrics(run_in(tmp_path))
    numbers.add(7, {"loss": 2.5, "nan": math.nan, "low": -math.inf, "a-b": 1.0})
    numbers.add(9, {"loss": 0.1})
    numbers.add(7, {"heldout/loss": 3.5, "heldout/accuracy": 0.25})
    values = samples(generate_latest(numbers.registry).decode())
    assert values["loss", None] == 0.1 and values["step", None] == 9
    assert values["evaluation_loss", "heldout"] == 3.5
    assert values["evaluation_step", "heldout"] == 7
    assert math.isnan(values["nan", None]) and values["low", None] == -math.inf
    assert values["a_b", None] == 1 and values["running", None] == 1
    assert values["updated_seconds", None] > 1.7e9


def test_the_file_is_complete_and_says_when_the_run_has_ended(tmp_path):
    with pytest.raises(ConfigError, match="PrometheusTextfile.directory is '/nothing'"):
        PrometheusTextfile("/nothing").check()
    run = run_in(tmp_path)
    for directory, name in ((None, "metrics.prom"), (str(tmp_path), f"praxis_lite_{run.id}.prom")):
        tracker = PrometheusTextfile(directory)
        tracker.check()
        tracker.start(run)
        tracker.scalars(3, {"loss": 1.5})
        assert samples((tmp_path / name).read_text())["running", None] == 1
        tracker.end("finished")
        values = samples((tmp_path / name).read_text())
        assert values["running", None] == 0 and values["loss", None] == 1.5
    assert sorted(os.listdir(tmp_path)) == ["metrics.prom", f"praxis_lite_{run.id}.prom"]


def test_the_port_serves_the_numbers_on_this_machine_alone_until_the_run_ends(tmp_path):
    notes = []
    tracker = MetricsEndpoint(0)
    tracker.start(run_in(tmp_path, note=notes.append))
    try:
        tracker.scalars(3, {"loss": 1.5})
        address = notes[0].removeprefix("metrics for Prometheus: ")
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert samples(answer.read().decode())["loss", None] == 1.5
        port = int(address.rpartition(":")[2].split("/")[0])
        with pytest.raises(OSError, match="in use"):
            MetricsEndpoint(port).start(run_in(tmp_path))
        foreign = urllib.request.Request(address, headers={"Host": "evil.com"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(foreign, timeout=10)
        refused.value.close()
        # What listens on all addresses is reached by this machine's other ones, too.
        other = socket.gethostbyname(socket.gethostname())
        if other != "127.0.0.1" and not other.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((other, port), timeout=2).close()
    finally:
        tracker.end("finished")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2).close()


def test_slow_clients_keep_nobody_out(tmp_path):
    notes, slow = [], []
    tracker = MetricsEndpoint(0)
    tracker.start(run_in(tmp_path, note=notes.append))
    tracker.scalars(3, {"loss": 1.5})
    address = notes[0].removeprefix("metrics for Prometheus: ")
    port = int(address.rpartition(":")[2].split("/")[0])
    num_threads = threading.active_count()
    try:
        for _ in range(3 * MAX_CONNECTIONS):
            slow.append(socket.create_connection(("127.0.0.1", port), 5))
            slow[-1].sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert samples(answer.read().decode())["loss", None] == 1.5
        deadline = time.monotonic() + 5
        while threading.active_count() > num_threads + MAX_CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for connection in slow:
            connection.close()
        tracker.end("finished")
