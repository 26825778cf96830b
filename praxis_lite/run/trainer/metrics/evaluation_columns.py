"""eval_metrics.jsonl as columns of numbers, by dataset."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.run.trainer.metrics.decimal_numbers import is_number, number_or_nan
from praxis_lite.run.trainer.metrics.json_lines import lines_if_any


def evaluation_columns(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns the columns by dataset, then by name, each float64 [evaluations of the dataset].

    "step" is int64. An evaluation without a number has NaN there. A column without any number is
    left out. Without a file there are no datasets.

    Raises:
      ConfigError: as `read_json_lines`.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines_if_any(path):
        lines.setdefault(str(line.get("dataset", "")), []).append(line)
    return {dataset: _columns(group) for dataset, group in lines.items()}


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if is_number(value)
    )
    columns = {
        name: np.array([number_or_nan(line.get(name)) for line in lines]) for name in names
    }
    return columns | {"step": np.array([line["step"] for line in lines], np.int64)}

