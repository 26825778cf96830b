"""Checks the type and range of the integer settings of a dataclass."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import require

CHANGE = "Change it in the experiment's run(), or with --set."


def check_whole_numbers(
    path: str, settings: Any, ranges: Mapping[str, tuple[float, float]] = {}
) -> None:
    """Checks each field of a dataclass that is annotated as `int` or `int | None`.

    Args:
      path: Of the settings in a job, "run.checkpoints".
      ranges: The smallest and the largest value of fields whose range is not "1 or more".

    Raises:
      ConfigError: A number has the wrong type, or is out of its range.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.type not in (int, int | None) or (value is None and field.type is not int):
            continue
        least, most = ranges.get(field.name, (1, math.inf))
        expected = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        absent = "" if field.type is int else ", or None"
        require(
            type(value) is int and least <= value <= most, f"{path}.{field.name}", value,
            f"a whole number, {expected}{absent}", CHANGE,
        )
