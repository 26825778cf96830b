"""JSON lines: what is written comes back, and a killed run leaves each step once."""

import itertools
import json
import math
import os
import threading
import time

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.file_reading import read_json
from praxis_lite.trainer.metrics import json_lines
from praxis_lite.trainer.metrics.json_lines import (
    JsonLinesWriter,
    append_lines,
    evaluation_lines,
    newest_lines,
    read_json_lines,
    sampled_lines,
    training_lines,
)
from praxis_lite.trainer.metrics.records import add_records


def write_steps(path, steps, resume_step=-1):
    with JsonLinesWriter(path, resume_step) as writer:
        for step in steps:
            writer.write({"step": step})


def steps_in(path):
    return [line["step"] for line in read_json_lines(path)]


def test_float32_round_trips_bit_for_bit(tmp_path):
    rng = np.random.default_rng(13)
    # Random bits reach every exponent, subnormals and both zeros' neighborhood included.
    values = rng.integers(0, 2**32, 997, dtype=np.uint32).view(np.float32)
    values = np.append(values[np.isfinite(values)], np.float32([0.0, -0.0, 1e-45, 3.4028235e38]))
    with JsonLinesWriter(tmp_path / "m.jsonl", -1) as writer:
        for step, value in enumerate(values):
            writer.write({"step": step, "loss": value})
    got = np.array([line["loss"] for line in read_json_lines(tmp_path / "m.jsonl")], np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), values.view(np.uint32))


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLinesWriter(path, -1) as writer:
        for step in range(1, 8):
            writer.write({"step": step})
            assert steps_in(path) == list(range(1, 8))[:step]


def test_key_order_depends_on_the_keys_alone(tmp_path):
    line = {"tokens_per_second": 3.0, "loss": 2.0, "dataset": "dev", "grad_norm": 1.0, "step": 7}
    with JsonLinesWriter(tmp_path / "m.jsonl", -1) as writer:
        writer.write(line)
        writer.write(dict(reversed(line.items())))
    first, second = (tmp_path / "m.jsonl").read_text().splitlines()
    assert first == second
    assert list(json.loads(first)) == ["step", "dataset", "loss", "grad_norm", "tokens_per_second"]


def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLinesWriter(path, -1) as writer:
        writer.write({"step": 1, "loss": np.float32(math.nan), "a": math.inf, "b": [-math.inf]})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (line,) = read_json_lines(path)
    assert math.isnan(line["loss"])
    assert (line["a"], line["b"]) == (math.inf, [-math.inf])


def test_arrays_become_plain_numbers(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    with JsonLinesWriter(tmp_path / "m.jsonl", -1) as writer:
        writer.write(
            {
                "step": np.int64(3),
                "a": jnp.asarray(1.5, jnp.bfloat16),
                "b": jnp.asarray(7),
                "c": np.bool_(True),
                "d": {"e": np.float16(0.5)},
                "f": None,
                "g": "text",
            }
        )
    assert read_json_lines(tmp_path / "m.jsonl") == [
        {"step": 3, "a": 1.5, "b": 7, "c": True, "d": {"e": 0.5}, "f": None, "g": "text"}
    ]


def test_an_interrupted_run_leaves_the_bytes_of_an_uninterrupted_one(tmp_path):
    losses = np.random.default_rng(7).normal(size=38).astype(np.float32)

    def write(path, steps, resume_step=-1):
        with JsonLinesWriter(path, resume_step) as writer:
            for step in steps:
                writer.write({"step": step, "loss": losses[step]})

    write(tmp_path / "whole.jsonl", range(1, 38))
    write(tmp_path / "parts.jsonl", range(1, 30))
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')
    write(tmp_path / "parts.jsonl", range(14, 38), resume_step=13)
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("tail", ['{"step": 8, "lo', "{", '{"step": 8', "\0\0\0", '{"data": "\xc3'])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 8))
    with path.open("ab") as file:
        file.write(tail.encode("latin-1"))
    assert steps_in(path) == list(range(1, 8))
    write_steps(path, [8, 9], resume_step=7)
    assert steps_in(path) == list(range(1, 10))


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    write_steps(path, [3], resume_step=2)
    assert steps_in(path) == [1, 2, 3]


@pytest.mark.parametrize("bad", ["{", "[1]", "7", '{"loss": 1.0}', '{"step": "3"}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    with pytest.raises(ConfigError, match=r"m\.jsonl.*2"):
        JsonLinesWriter(path, 3)
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize(
    "bad",
    [
        '{"step": 2}',
        '{"step": 2, "dataset": ["x"]}',
        '{"step": 2, "dataset": "x", "loss": "low"}',
        '{"step": 2, "dataset": "x", "loss": null}',
    ],
)
def test_an_evaluation_without_a_dataset_or_numbers_is_named(tmp_path, bad):
    path = tmp_path / "eval_metrics.jsonl"
    good = '{"step": 1, "dataset": "x", "loss": "NaN"}\n'
    path.write_text(good)
    (line,) = evaluation_lines(path)
    assert math.isnan(line["loss"])
    path.write_text(f"{good}{bad}\n")
    with pytest.raises(ConfigError, match=r"line 2 is .*; expected a string 'dataset' and numbers"):
        evaluation_lines(path)
    path.write_text(f"{bad}\n")
    with pytest.raises(ConfigError, match="line 1 is .*; expected a number 'loss'"):
        training_lines(path)


def test_a_whole_last_line_without_a_step_is_no_cut_line(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"m\.jsonl.*2"):
        read_json_lines(tmp_path / "m.jsonl")


@pytest.mark.parametrize("call", ["fsync", "ftruncate"])
def test_a_kill_while_lines_are_moved_loses_none(tmp_path, monkeypatch, call):
    path, lost = tmp_path / "m.jsonl", tmp_path / "m.lost.jsonl"
    write_steps(path, range(1, 14))
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, call, killed)
        JsonLinesWriter(path, 7)
    assert path.read_bytes() == before
    lost.write_bytes(lost.read_bytes() + b'{"step": 9, "lo')  # Of a kill within a line.
    write_steps(path, [8], resume_step=7)
    assert steps_in(path) == [*range(1, 9)]
    assert set(steps_in(lost)) == {*range(8, 14)}


@pytest.mark.parametrize("num_lines", [1_000, 100_000])
def test_the_lines_that_stay_are_not_read_however_many(tmp_path, monkeypatch, num_lines):
    path, read = tmp_path / "m.jsonl", []
    text = "".join(f'{{"step": {step}, "loss": {step / 7}}}\n' for step in range(1, num_lines + 1))
    path.write_text(text)
    parsed = json_lines._parse_line
    monkeypatch.setattr(json_lines, "_parse_line", lambda text: read.append(text) or parsed(text))
    number = path.stat().st_ino
    with JsonLinesWriter(path, num_lines - 3) as writer:
        assert writer.lost_steps == (num_lines - 2, num_lines)
        assert writer.newest_kept == num_lines - 3
        writer.write({"step": num_lines - 2})
    losses = [line["loss"] for line in itertools.islice(newest_lines(path), 1, 3)]
    assert losses == [(num_lines - 3) / 7, (num_lines - 4) / 7]
    assert len(read) < 4_000 and path.stat().st_ino == number
    sample = [line["step"] for line in sampled_lines(path)]
    assert (sample[0], sample[-1]) == (1, num_lines - 2) and sample == sorted(set(sample))
    assert path.read_text()[:-10] == text[: len(path.read_text()) - 10]


def test_lines_of_other_processes_stay_among_lost_ones(tmp_path):
    path = tmp_path / "eval_metrics.jsonl"
    lines = [(5, "own"), (10, "own"), (5, "guest"), (15, "own"), (10, "guest"), (5, "guest")]
    with JsonLinesWriter(path, -1) as writer:
        for step, name in lines:
            writer.write({"step": step, "dataset": name})
    with JsonLinesWriter(path, 5) as writer:
        assert writer.lost_steps == (10, 10)
    assert [line["dataset"] for line in read_json_lines(path)] == ["own", "guest", "guest"]
    assert steps_in(tmp_path / "eval_metrics.lost.jsonl") == [10, 15, 10]


@pytest.mark.parametrize(
    "tail, steps",
    [
        (b'{"step": 3, "lo', [1, 2, 7]),
        (b'{"step": 3}', [1, 2, 3, 7]),
        (b"", [1, 2, 7]),
    ],
)
def test_a_guest_adds_lines_behind_a_writer_that_was_killed(tmp_path, tail, steps):
    path = tmp_path / "eval_metrics.jsonl"
    write_steps(path, [1, 2])
    path.write_bytes(path.read_bytes() + tail)
    append_lines(path, [{"step": 7, "loss": 1.5}])
    assert steps_in(path) == steps
    append_lines(tmp_path / "new.jsonl", [{"step": 5}, {"step": 6}])
    assert steps_in(tmp_path / "new.jsonl") == [5, 6]


def test_no_line_of_a_guest_is_lost_while_the_writer_mends_its_file_and_goes_on(
    tmp_path, monkeypatch
):
    path = tmp_path / "eval_metrics.jsonl"
    write_steps(path, [0])

    def slowly(path, content):
        time.sleep(0.01)
        write_atomically(path, content)

    monkeypatch.setattr(json_lines, "write_atomically", slowly)

    def guest(name):
        for number in range(25):
            append_lines(path, [{"step": 0, "dataset": name, "loss": float(number)}])

    guests = [threading.Thread(target=guest, args=(name,)) for name in ("a", "b")]
    for thread in guests:
        thread.start()
    while any(thread.is_alive() for thread in guests):
        # Line 9 is to be lost at the next launch, so the file is replaced each time.
        with JsonLinesWriter(path, 3) as writer:
            writer.write({"step": 9, "dataset": "own"})
    lines = [(line.get("dataset"), line.get("loss")) for line in read_json_lines(path)]
    for name in ("a", "b"):
        assert [loss for dataset, loss in lines if dataset == name] == [*map(float, range(25))]


def test_a_missing_file_has_no_lines(tmp_path):
    assert read_json_lines(tmp_path / "m.jsonl") == []


@pytest.mark.parametrize(
    "line", [{"loss": 1.0}, {"step": 1, "loss": np.ones(3)}, {"step": 1, "loss": object()}]
)
def test_a_line_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, line):
    with JsonLinesWriter(tmp_path / "m.jsonl", -1) as writer, pytest.raises(ValueError):
        writer.write(line)
    assert read_json_lines(tmp_path / "m.jsonl") == []


IN_ITS_PLACE = {"pipe": os.mkfifo, "folder": os.mkdir}


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_what_lies_in_a_files_place_is_refused_at_once(kind, tmp_path):
    for name in ("metrics.jsonl", "metrics.lost.jsonl", "records.jsonl"):
        IN_ITS_PLACE[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        read_json_lines(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        JsonLinesWriter(tmp_path / "metrics.jsonl", 3)
    with pytest.raises(ConfigError, match=r"records\.jsonl"):
        add_records(tmp_path / "records.jsonl", [{"a": 1}])
    with pytest.raises(ConfigError, match=r"records\.jsonl"):
        read_json(tmp_path / "records.jsonl")
    # Lines of steps that are made again are to go where something else lies.
    os.rename(tmp_path / "metrics.jsonl", tmp_path / "other")
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(ConfigError, match=r"metrics\.lost\.jsonl"):
        JsonLinesWriter(tmp_path / "metrics.jsonl", 3)


def test_records_are_added_once_behind_what_stands_there(tmp_path):
    path = tmp_path / "new" / "10.jsonl"
    records = [{"a": "one\u2028two\x85three\r"}, {"a": 2}]
    add_records(path, records[:1])
    add_records(path, records)
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == records
    path.write_bytes(b'\xff{"a": ')
    add_records(path, records)
    assert path.read_bytes().split(b"\n", 1)[0] == b'\xff{"a": '
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[1:-1]] == records


def test_records_of_several_writers_at_once_are_all_there(tmp_path):
    def add(writer):
        for number in range(13):
            add_records(tmp_path / "10.jsonl", [{"record": f"{writer} {number}"}])

    writers = [threading.Thread(target=add, args=(writer,)) for writer in range(3)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert len((tmp_path / "10.jsonl").read_text().splitlines()) == 3 * 13
