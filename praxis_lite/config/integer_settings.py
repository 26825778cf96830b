"""Checks the type and range of the integer settings of a dataclass."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import require

CHANGE = "Change it in the experiment's run(), or with --set."


def check_integers(
    path: str, settings: Any, ranges: Mapping[str, tuple[float, float]] = {}
) -> None:
    """Checks every field of a dataclass that is annotated as `int` or `int | None`.

    Args:
      path: Path of the settings in a job, such as "run.checkpoints".
      settings: The dataclass instance.
      ranges: (smallest value, largest value) of fields whose range is not "1 or more".

    Raises:
      ConfigError: A number has the wrong type, or is out of range.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.type not in (int, int | None) or (value is None and field.type is not int):
            continue
        smallest, largest = ranges.get(field.name, (1, math.inf))
        in_range = f"{smallest} or more" if largest == math.inf else f"from {smallest} to {largest}"
        or_none = "" if field.type is int else ", or None"
        require(
            type(value) is int and smallest <= value <= largest,
            f"{path}.{field.name}",
            value,
            f"a whole number, {in_range}{or_none}",
            CHANGE,
        )
