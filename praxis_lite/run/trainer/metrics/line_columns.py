"""Lines of metrics.jsonl and eval_metrics.jsonl as columns, each number exactly as it was written.

`MetricsColumns` reads long files faster, and numbers to within their last bit: for pictures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.run.trainer.metrics.decimal_numbers import is_number, number_or_nan

Columns = dict[str, np.ndarray]


def columns_of(lines: Sequence[Mapping[str, Any]]) -> Columns:
    """Returns the columns by name, each float64 of shape [lines], but "step" int64.

    A line without a number has NaN there. A column without any number is left out.

    Args:
      lines: as `read_json_lines` returns them.
    """
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if is_number(value)
    )
    columns = {
        name: np.array([number_or_nan(line.get(name)) for line in lines]) for name in names
    }
    return columns | {"step": np.array([line["step"] for line in lines], np.int64)}


def columns_by_dataset(lines: Sequence[Mapping[str, Any]]) -> dict[str, Columns]:
    """Returns the columns of the lines of each dataset, as `columns_of`."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(str(line.get("dataset", "")), []).append(line)
    return {dataset: columns_of(group) for dataset, group in groups.items()}
