"""metrics.jsonl as columns, against Python's json; a file that grows, is cut, damaged, replaced."""

import json
import math
import sys

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.trainer.metrics import columns as columns_module
from praxis_lite.trainer.metrics.columns import (
    MetricsColumns,
    columns_by_dataset,
    columns_of,
)
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter, json_line, read_json_lines

KEYS = ("loss", "accuracy", "grad_norm/ffn", "learning_rate", "num_skipped_steps", "step_time")


def random_lines(num_lines, seed=0):
    """Returns lines with numbers of every size and form."""
    rng = np.random.default_rng(seed)

    def number():
        value = float(rng.normal() * 10.0 ** rng.integers(-30, 30))
        forms = (
            lambda: value,
            lambda: float(np.float32(value)),
            lambda: int(rng.integers(-9, 10**9)),
            lambda: float(rng.integers(0, 3)),
            lambda: round(float(rng.normal()), 3),
            lambda: float(rng.choice([math.nan, math.inf, -math.inf])),
            lambda: 10**30,
            lambda: float(np.float32(rng.random())),
            lambda: 2.0**53 + 2,
        )
        return forms[rng.integers(len(forms))]()

    return [{"step": step, **{key: number() for key in KEYS}} for step in range(1, num_lines + 1)]


def columns_in(path):
    reader = MetricsColumns(path)
    assert reader.read()
    return reader.columns(), reader.num_unreadable


def assert_same(actual, lines):
    names = {key for line in lines for key in line}
    assert set(actual) == names
    for name in names:
        expected = np.array([line.get(name, math.nan) for line in lines], float)
        np.testing.assert_array_equal(actual[name], expected, err_msg=name)


def test_every_number_is_that_of_json(tmp_path):
    lines = random_lines(701)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(map(json_line, lines)))
    actual, num_unreadable = columns_in(file)
    assert_same(actual, lines)
    assert num_unreadable == 0


def test_lines_of_the_same_keys_and_finite_numbers_are_parsed_together(tmp_path, monkeypatch):
    # Without the method that parses one line at a time.
    monkeypatch.delattr(MetricsColumns, "_parse_lines")
    lines = [
        {
            key: value if math.isfinite(value) and value < 2**53 else 0.5
            for key, value in line.items()
        }
        for line in random_lines(37)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(map(json_line, lines)))
    assert_same(columns_in(file)[0], lines)


def test_lines_of_other_keys_have_nan_where_they_have_no_number(tmp_path):
    lines = random_lines(37)
    lines[7].pop("accuracy")
    lines[13]["hook/x"] = 1.5
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(map(json_line, lines)))
    assert_same(columns_in(file)[0], lines)


# A line between others, and the loss in it; None: the line is unreadable and is left out.
STRANGE_LINES = {
    '{"step": 2, "loss": 0.5, "x": {"step": 7, "loss": 3}}': 0.5,
    '{"step": 2, "loss": 0.5, "x": "a: b, c}"}': 0.5,
    '{"loss": 0.5, "step": 2}': 0.5,
    ' { "step" : 2, "loss" : 5e-1 } ': 0.5,
    '{"step": 2, "loss": "Infinity"}': math.inf,
    '{"step": 2, "loss": "low"}': math.nan,
    '{"step": 2, "loss": null}': math.nan,
    '{"step": 2, "l\\u006fss": 0.5}': 0.5,
    '{"step": 2, "loss": }': None,
    '{"step": 2, "loss": 0.5': None,
    '{"step": 2.5, "loss": 0.5}': None,
    '{"step": "NaN", "loss": 0.5}': None,
    '{"loss": 0.5}': None,
    "[1, 2]": None,
    "\0\0\0\0": None,
}


@pytest.mark.parametrize("line", STRANGE_LINES, ids=range(len(STRANGE_LINES)))
def test_a_strange_line_is_read_as_json_reads_it_or_left_out(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    others = [{"step": step, "loss": step / 8} for step in (1, 3, 5)]
    texts = list(map(json_line, others))
    texts.insert(1, f"{line}\n")
    file.write_text("".join(texts))
    actual, num_unreadable = columns_in(file)
    loss = STRANGE_LINES[line]
    expected = [1 / 8, *([] if loss is None else [loss]), 3 / 8, 5 / 8]
    np.testing.assert_array_equal(actual["loss"], expected)
    assert num_unreadable == (loss is None)


def test_what_one_line_lacks_and_the_next_has_too_much_is_not_taken_for_two_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2}\n{"step": 2}\n{"step": 3, "loss": 4, "x": 5}\n')
    actual, _ = columns_in(file)
    np.testing.assert_array_equal(actual["loss"], [2, math.nan, 4])


def test_a_growing_file_is_read_from_where_it_ended_and_never_half_a_line(tmp_path):
    lines = random_lines(13)
    texts = list(map(json_line, lines))
    file = tmp_path / "metrics.jsonl"
    reader = MetricsColumns(file)
    assert not reader.read() and list(reader.columns()) == ["step"]
    file.write_text("".join(texts[:5]) + texts[5][:-9])
    assert reader.read()
    assert_same(reader.columns(), lines[:5])
    assert not reader.read()
    with file.open("a") as more:
        more.write(texts[5][-9:] + "".join(texts[6:]))
    assert reader.read()
    assert_same(reader.columns(), lines)
    assert reader.num_unreadable == 0


def test_a_file_that_was_replaced_or_removed_is_read_anew(tmp_path):
    lines = random_lines(13)
    file, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    file.write_text("".join(map(json_line, lines)))
    reader = MetricsColumns(file)
    reader.read()
    other.write_text("".join(map(json_line, lines[:7])))
    other.replace(file)
    assert reader.read()
    assert_same(reader.columns(), lines[:7])
    with file.open("r+") as cut:  # As by a launch that makes steps again.
        cut.truncate(len("".join(map(json_line, lines[:5]))))
        cut.seek(0, 2)
        cut.writelines(map(json_line, lines[6:]))
    assert reader.read()
    assert_same(reader.columns(), lines[:5] + lines[6:])
    file.unlink()
    assert reader.read() and not reader.read()
    assert len(reader.columns()["step"]) == 0


@pytest.mark.parametrize("size", [0, 1, 900])
def test_lines_longer_than_a_block_are_read(size, tmp_path, monkeypatch):
    monkeypatch.setattr(columns_module, "_BLOCK_BYTES", 97)
    file = tmp_path / "metrics.jsonl"
    long = json.dumps({"step": 2, "text": "x" * size, "loss": 0.5})
    file.write_text(f'{{"step": 1, "loss": 1.5}}\n{long}\n{{"step": 3, "loss": 2.5}}\n{long}')
    reader = MetricsColumns(file)
    reader.read()
    assert reader.columns()["step"].tolist() == [1, 2, 3] and reader.num_unreadable == 0
    assert reader.columns()["loss"].tolist() == [1.5, 0.5, 2.5]
    with file.open("a") as more:
        more.write("\n")
    assert reader.read() and reader.columns()["step"].tolist() == [1, 2, 3, 2]


def test_a_directory_in_its_place_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="metrics.jsonl cannot be read"):
        MetricsColumns(tmp_path / "metrics.jsonl").read()


EVALUATED = [
    {"step": 3, "dataset": "heldout", "loss": 4.5830535888671875},
    {"step": 3, "dataset": "code", "loss": 1.5, "accuracy": 0.25},
    {"step": 6, "dataset": "heldout", "loss": math.nan, "accuracy": 1, "note": "slow"},
    {"step": 6, "dataset": "code", "loss": math.inf, "accuracy": 0.5},
]


def test_evaluations_by_dataset_are_those_of_the_file(tmp_path):
    path = tmp_path / "eval_metrics.jsonl"
    with JsonLinesWriter(path, sys.maxsize) as writer:
        for line in EVALUATED:
            writer.write(line)
    by_hand = [json.loads(text) for text in path.read_text().splitlines()]
    lines = read_json_lines(path)
    result = columns_by_dataset(lines[2:] + lines[:2])  # As a process beside the training adds.
    assert result.keys() == {"heldout", "code"}
    for dataset, columns in result.items():
        same = [line for line in by_hand if line["dataset"] == dataset]
        assert columns.keys() == {"step", "loss", "accuracy"}
        assert columns["step"].dtype == np.int64 and columns["step"].tolist() == [3, 6]
        np.testing.assert_array_equal(columns["loss"], [float(line["loss"]) for line in same])
    np.testing.assert_array_equal(result["heldout"]["accuracy"], [math.nan, 1.0])
    whole = columns_of(lines)
    np.testing.assert_array_equal(whole["accuracy"], [math.nan, 0.25, 1.0, 0.5])
    assert columns_by_dataset([]) == {} and columns_of([])["step"].shape == (0,)
