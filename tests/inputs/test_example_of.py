"""The example in a row of a batch, as messages name it: by number, or by file and line."""

import json

import numpy as np
import pytest

from praxis_lite.inputs import FromSource, InMemory, JsonLines, Mixture, WithWorkers
from praxis_lite.inputs.pipeline_checks import non_finite_rows
from praxis_lite.trainer.checks.job_checks import notes_on_batch_size

# Each value is its example's number; a mixture's second source counts from 100.
VALUES = np.arange(13, dtype=np.float32)


def in_memory(first=0, shuffle=True):
    return InMemory({"x": VALUES + first}, 5, seed=3, shuffle=shuffle)


def lines(folder, keep=None):
    for name, values in (("a", VALUES[:6]), ("b", VALUES[6:])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"x": float(x)}) + "\n" for x in values)
        )
    return FromSource(JsonLines(f"{folder}/*.jsonl"), 5, keep=keep, seed=3, shuffle=True)


def is_odd(example):
    return example["x"] % 2 == 1


@pytest.mark.parametrize("kind", ["in memory", "in order", "workers", "lines", "kept", "mixture"])
def test_the_example_of_a_row_is_the_one_that_is_in_it(kind, tmp_path):
    make = {
        "in memory": in_memory,
        "in order": lambda: in_memory(shuffle=False),
        "workers": lambda: WithWorkers(in_memory(), 1, kind="threads"),
        "lines": lambda: lines(tmp_path),
        "kept": lambda: lines(tmp_path, is_odd),
        "mixture": lambda: Mixture(
            {"one": in_memory(), "two": in_memory(100)}, {"one": 2, "two": 1}, 6
        ),
    }
    pipeline = make[kind]()
    for index in (0, 2):
        batch = next(pipeline.batches(index))
        for row in range(pipeline.batch_size):
            x, actual = int(batch["x"][row]), pipeline.example_of(index, row)
            if not batch["weights"][row]:
                assert actual == ""
            elif kind in ("lines", "kept"):
                file, line = ("a", x) if x < 6 else ("b", x - 6)
                assert actual == f"{tmp_path}/{file}.jsonl:{line + 1}"
            elif kind == "mixture":
                assert actual == f"{'two' if x >= 100 else 'one'}: example {x % 100}"
            else:
                assert actual == f"example {x}"


def test_rows_far_into_a_file_are_selected(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(300)))
    pipeline = FromSource(JsonLines(f"{tmp_path}/a.jsonl"), 7, keep=is_odd, shuffle=False)
    assert pipeline.num_examples == 150
    assert next(pipeline.batches(20))["x"].tolist() == [*range(281, 294, 2)]


def test_nan_names_the_example_and_not_only_the_row_of_a_shuffled_batch():
    pipeline = in_memory()
    batch = dict(next(pipeline.batches(1)))
    number = int(batch["x"][2])
    batch["x"][2] = np.nan
    actual = non_finite_rows(batch, 0, lambda row: pipeline.example_of(1, row))
    assert actual == f"NaN in 'x', row 2 (example {number})"


@pytest.mark.parametrize(("batch_size", "is_noted"), [(13, False), (14, True), (4, False)])
def test_a_batch_larger_than_the_data_is_noted(batch_size, is_noted):
    pipeline = InMemory({"x": VALUES}, batch_size, shuffle=True)
    for item in (pipeline, WithWorkers(pipeline, 1, kind="threads")):
        notes = notes_on_batch_size(item)
        assert len(notes) == is_noted
        assert not notes or (
            " 13 examples" in notes[0] and f"batch_size of {batch_size}" in notes[0]
        )
