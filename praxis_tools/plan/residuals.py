"""Corrects plans with residuals: ratios of measured to predicted step times in earlier runs."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import append_text, lines_of, parse_json
from praxis_lite.host.object_stores import AnyPath
from praxis_tools.plan.step_plan import Correction, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """The measured and predicted time of a step, stored as one line of a residuals file.

    Attributes:
      chip: Name of the chip in praxis_tools/plan/chips.py.
      step: "train", "eval" or "decode".
      axis_sizes: Number of devices along each mesh axis.
      flops_per_device: Matmul flops of the step, which identify the model and batch size.
      predicted_seconds: Predicted time of one step.
      measured_seconds: Measured time of one step.
      source: "--measure" or "profile"; informational.
      jax: JAX version; informational.
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
        """Measured time divided by predicted time."""
        return self.measured_seconds / self.predicted_seconds


def append_residual(file: AnyPath, residual: Residual) -> None:
    """Appends a residual to a file. Creates the file if it does not exist.

    Raises:
      ConfigError: The file cannot be written.
    """
    try:
        append_text(file, json.dumps(dataclasses.asdict(residual)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"Cannot write {file}: {error.strerror or error}. Choose another file with --residuals."
        ) from None


def read_residuals(file: AnyPath) -> list[Residual]:
    """Reads the residuals in a file. Returns an empty list if the file does not exist.

    Raises:
      ConfigError: A line is not a valid residual. The message contains the file and line number.
    """
    return [
        _parse(line, f"{file}, line {number}")
        for number, line in enumerate(lines_of(file), start=1)
    ]


def _parse(line: str, location: str) -> Residual:
    try:
        residual = Residual(**parse_json(line))
        if not (residual.predicted_seconds > 0 and residual.measured_seconds > 0):
            raise ValueError("its seconds are not positive")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{location}: not a valid residual ({error}). Remove the line, or choose another file "
            "with --residuals."
        ) from None
    return residual


def apply_residuals(
    plan: StepPlan,
    chip: str,
    axis_sizes: Mapping[str, int],
    file: AnyPath | None,
    residuals: Sequence[Residual],
) -> StepPlan:
    """Corrects a plan by the median ratio of measured to predicted time.

    The median is taken over the residuals for the same step or, if there are none, for other steps
    of the same kind on the same chip. If these are also missing, the plan is returned unchanged.

    Args:
      plan: The plan of a step.
      chip: Name of the chip for which the step was planned.
      axis_sizes: Number of devices along each mesh axis.
      file: The file that contains the residuals; only used in the plan's text.
      residuals: The residuals from earlier runs.
    """
    if plan.step_seconds is None:
        return plan
    same_kind = [
        residual for residual in residuals if (residual.chip, residual.step) == (chip, plan.step)
    ]
    same_step = [
        residual
        for residual in same_kind
        if residual.axis_sizes == dict(axis_sizes)
        and residual.flops_per_device == plan.flops_per_device
    ]
    chosen = same_step or same_kind
    if not chosen:
        return plan
    ratio = statistics.median(residual.ratio for residual in chosen)
    return dataclasses.replace(
        plan,
        correction=Correction(
            seconds=plan.step_seconds * ratio,
            ratio=ratio,
            count=len(chosen),
            is_of_step=bool(same_step),
            chip=chip,
            file=str(file),
        ),
    )
