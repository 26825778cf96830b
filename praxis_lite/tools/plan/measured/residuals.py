"""Residuals: measured over predicted seconds of steps that ran. They correct later plans."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import lines_of, opened_to_append, parse_json
from praxis_lite.tools.plan.step_plan import Correction, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """The measured and the predicted seconds of a step: a line of a file of residuals.

    Attributes:
      chip: of praxis_lite/tools/plan/chips.py.
      step: "train", "eval" or "decode".
      axis_sizes: of the mesh.
      flops_per_device: of the step's matmuls; with the mesh it tells models and batches apart.
      predicted_seconds, measured_seconds: of a step.
      source: "--measure" or "profile", for people.
      jax: its version, for people.
    """

    chip: str
    step: str
    axis_sizes: Mapping[str, int]
    flops_per_device: int
    predicted_seconds: float
    measured_seconds: float
    source: str
    jax: str = jax.__version__

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_seconds / self.predicted_seconds

    def is_of(self, other: "Residual") -> bool:
        """Returns True if both are of the same step on the same devices."""
        names = ("chip", "step", "axis_sizes", "flops_per_device")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def append_residual(file: Path, residual: Residual) -> None:
    """Adds a line to a file of residuals, which is made if it is absent.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        with opened_to_append(file) as stream:
            stream.write(json.dumps(dataclasses.asdict(residual)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror or error}). Name another file with "
            "--residuals."
        ) from None


def read_residuals(file: Path) -> list[Residual]:
    """Returns the residuals of a file, a line each; none if there is no such file.

    Raises:
      ConfigError: a line is no residual; names file and line.
    """
    return [_residual(text, f"{file}, line {index}") for index, text in
            enumerate(lines_of(file), start=1)]


def residual_of(
    plan: StepPlan, chip: str, axis_sizes: Mapping[str, int], *, source: str,
    measured_seconds: float = math.nan,
) -> Residual:
    """Returns the residual of a plan; without measured seconds it only says which step it is of."""
    return Residual(
        chip=chip, step=plan.step, axis_sizes=dict(axis_sizes),
        flops_per_device=plan.flops_per_device, predicted_seconds=plan.step_seconds,
        measured_seconds=measured_seconds, source=source,
    )


def corrected(
    plan: StepPlan, chip: str, axis_sizes: Mapping[str, int], file: Path | None,
    residuals: Sequence[Residual],
) -> StepPlan:
    """Returns the plan with its correction, if a residual is of its kind of chip and step.

    Those of this very step count alone; where there are none, those of other steps.

    Args:
      residuals: of `file`.
    """
    if plan.step_seconds is None:
        return plan
    planned = residual_of(plan, chip, axis_sizes, source="plan")
    alike = [item for item in residuals if (item.chip, item.step) == (chip, plan.step)]
    same = [item for item in alike if item.is_of(planned)]
    chosen = same or alike
    if not chosen:
        return plan
    ratio = statistics.median(item.ratio for item in chosen)
    return dataclasses.replace(plan, correction=Correction(
        seconds=plan.step_seconds * ratio, ratio=ratio, count=len(chosen), is_of_step=bool(same),
        chip=chip, file=str(file),
    ))


_NUMBERS = ("flops_per_device", "predicted_seconds", "measured_seconds")


def _residual(text: str, where: str) -> Residual:
    try:
        fields: Any = parse_json(text)
        residual = Residual(**fields)
        numbers = [*(getattr(residual, name) for name in _NUMBERS), *residual.axis_sizes.values()]
        if not all(type(number) in (int, float) and number >= 0 for number in numbers):
            raise ValueError("a number is missing or negative")
        if not (residual.predicted_seconds > 0 and residual.measured_seconds > 0):
            raise ValueError("seconds that are not positive")
        if not all(isinstance(word, str) for word in (residual.chip, residual.step)):
            raise ValueError("chip and step are names")
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} is no residual of a plan ({error}). Wanted is a line as --mode=plan "
            "--measure adds it; take the line out, or name another file with --residuals."
        ) from None
    return residual
