"""Prometheus' text format, read back by its own client; the file, and the port."""

import math
import os
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from praxis_lite import ConfigError, PrometheusTextfile
from praxis_lite.run.trackers.metrics_endpoint import MetricsEndpoint
from praxis_lite.run.trackers.prometheus_text import PrometheusText
from tests.support.tracked_runs import run_in


def samples(text):
    """Returns {(name, dataset): value} of a text, whose labels name the run."""
    values = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        for sample in family.samples:
            assert sample.labels["run"] == "job" and sample.labels["experiment"] == "zoo.Tiny"
            key = (sample.name.removeprefix("praxis_lite_"), sample.labels.get("dataset"))
            assert key not in values or "metric" in sample.labels
            values[key] = sample.value
    return values


def test_the_text_has_the_newest_numbers_of_training_and_of_evaluations(tmp_path):
    text = PrometheusText(run_in(tmp_path))
    text.add(7, {"loss": 2.5, "nan": math.nan, "low": -math.inf, "a-b": 1.0})
    text.add(9, {"loss": 0.1})
    text.add(7, {"heldout/loss": 3.5, "heldout/accuracy": 0.25})
    values = samples(str(text))
    assert values["loss", None] == 0.1 and values["step", None] == 9
    assert values["evaluation_loss", "heldout"] == 3.5
    assert values["evaluation_step", "heldout"] == 7
    assert math.isnan(values["nan", None]) and values["low", None] == -math.inf
    assert values["a_b", None] == 1 and values["running", None] == 1
    assert values["updated_seconds", None] > 1.7e9


def test_two_names_that_read_the_same_are_told_apart_and_labels_are_escaped(tmp_path):
    text = PrometheusText(run_in(tmp_path, id='say "no"\\\n'))
    text.add(1, {"a-b": 1.0, "a.b": 2.0})
    (family,) = [
        family for family in text_string_to_metric_families(str(text)) if "a_b" in family.name
    ]
    assert [(item.labels.get("metric"), item.value) for item in family.samples] == [
        (None, 1.0), ("a.b", 2.0)
    ]
    assert family.samples[0].labels["run_id"] == 'say "no"\\\n'


def test_the_file_is_whole_and_says_when_the_run_has_ended(tmp_path):
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
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(address.replace("/metrics", "/etc/passwd"), timeout=10)
        missing.value.close()
        port = int(address.rpartition(":")[2].split("/")[0])
        with pytest.raises(OSError, match="in use"):
            MetricsEndpoint(port).start(run_in(tmp_path))
        # What listens on all addresses is reached by this machine's other ones, too.
        other = socket.gethostbyname(socket.gethostname())
        if other != "127.0.0.1" and not other.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((other, port), timeout=2).close()
    finally:
        tracker.end("finished")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
