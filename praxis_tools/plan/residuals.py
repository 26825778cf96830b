"""Residuals, the measured over predicted seconds of steps, which correct later plans."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import lines_of, opened_to_append, parse_json
from praxis_tools.plan.step_plan import Correction, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """The measured and the predicted seconds of a step: a line of a residuals file.

    Attributes:
      chip: a name in praxis_tools/plan/chips.py.
      step: "train", "eval" or "decode".
      axis_sizes: devices along each mesh axis.
      flops_per_device: the step's matmul flops, which identify the model and batch size.
      predicted_seconds, measured_seconds: seconds of a step.
      source: "--measure" or "profile", for human readers.
      jax: version of JAX, for human readers.
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
        """Measured over predicted seconds."""
        return self.measured_seconds / self.predicted_seconds


def append_residual(file: Path, residual: Residual) -> None:
    """Appends a residual to a file, which is created if it does not exist.

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
    """Returns the residuals in a file; none if the file does not exist.

    Raises:
      ConfigError: a line is not a valid residual; names file and line.
    """
    return [
        _parsed(line, f"{file}, line {number}")
        for number, line in enumerate(lines_of(file), start=1)
    ]


def _parsed(line: str, where: str) -> Residual:
    try:
        residual = Residual(**parse_json(line))
        if not (residual.predicted_seconds > 0 and residual.measured_seconds > 0):
            raise ValueError("its seconds are not positive")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} is not a residual of a plan ({error}). Remove the line, or name another file "
            "with --residuals."
        ) from None
    return residual


def corrected(
    plan: StepPlan, chip: str, axis_sizes: Mapping[str, int], file: Path | None,
    residuals: Sequence[Residual],
) -> StepPlan:
    """Returns the plan with a correction, if residuals exist for its chip and kind of step.

    Residuals of this very step are used, or if there are none, those of other steps.

    Args:
      file: where the residuals are from.
    """
    if plan.step_seconds is None:
        return plan
    similar = [item for item in residuals if (item.chip, item.step) == (chip, plan.step)]
    same = [
        item for item in similar
        if (item.axis_sizes, item.flops_per_device) == (dict(axis_sizes), plan.flops_per_device)
    ]
    chosen = same or similar
    if not chosen:
        return plan
    ratio = statistics.median(item.ratio for item in chosen)
    return dataclasses.replace(plan, correction=Correction(
        seconds=plan.step_seconds * ratio, ratio=ratio, count=len(chosen), is_of_step=bool(same),
        chip=chip, file=str(file),
    ))
