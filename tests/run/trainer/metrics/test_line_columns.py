"""Lines of numbers as columns, and by dataset, against the same file read by hand."""

import json
import math
import sys

import numpy as np

from praxis_lite.run.trainer.metrics.json_lines import JsonLinesWriter, read_json_lines
from praxis_lite.run.trainer.metrics.line_columns import columns_by_dataset, columns_of

LINES = [
    {"step": 3, "dataset": "heldout", "loss": 4.5830535888671875},
    {"step": 3, "dataset": "code", "loss": 1.5, "accuracy": 0.25},
    {"step": 6, "dataset": "heldout", "loss": math.nan, "accuracy": 1, "note": "slow"},
    {"step": 6, "dataset": "code", "loss": math.inf, "accuracy": 0.5},
]


def test_columns_are_those_of_the_file(tmp_path):
    path = tmp_path / "eval_metrics.jsonl"
    with JsonLinesWriter(path, sys.maxsize) as writer:
        for line in LINES:
            writer.write(line)
    by_hand = [json.loads(text) for text in path.read_text().splitlines()]
    lines = read_json_lines(path)
    result = columns_by_dataset(lines)
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
