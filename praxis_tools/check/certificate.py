"""The result of a check, formatted as a table, a one-line summary or JSON."""

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.host.text_table import table_lines


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of an actual value with the expected value.

    Attributes:
      mesh: Name of the mesh, such as "data 4, mdl 2".
      kind: The kind of value, such as "gradients".
      leaf: For example, the path of a weight or the name of a metric.
      step: Training step, counted from 0, or None if the value does not belong to a step.
      difference: Largest absolute difference between elements; infinity if the shapes differ or if
        an element is NaN in only one of the arrays.
      tolerance: Largest allowed difference.
      why: Explanation of the tolerance.
    """

    mesh: str
    kind: str
    leaf: str
    step: int | None
    difference: float
    tolerance: float
    why: str

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.tolerance

    @property
    def share(self) -> float:
        """The difference divided by the tolerance."""
        if self.tolerance == 0:
            return math.inf if self.difference else 0.0
        return self.difference / self.tolerance


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first failed comparison and the location of its cause.

    Attributes:
      kind: The kind of value; see `Comparison`.
      layer: Path of the first layer whose values differ, or "" if it is unknown.
      leaf: Leaf with the largest difference.
      step: Training step, counted from 0, or None.
      axis: Mesh axes that must be split for the difference to appear, joined by "+"; None if the
        difference appears on one device.
      mesh: Name of the mesh.
      difference: Largest absolute difference between elements.
      tolerance: Largest allowed difference.
    """

    kind: str
    layer: str
    leaf: str
    step: int | None
    axis: str | None
    mesh: str
    difference: float
    tolerance: float

    def __str__(self) -> str:
        parts = [f"layer {self.layer or 'unknown'}", f"leaf {self.leaf}"]
        parts += [] if self.step is None else [f"step {self.step}"]
        parts += [f"axis {self.axis}" if self.axis else "even on one device"]
        return (
            f"{self.kind}: {', '.join(parts)}; mesh {self.mesh}; differs by {self.difference:.3g}, "
            f"tolerance {self.tolerance:.3g}"
        )


@dataclasses.dataclass
class Certificate:
    """The result of `check_on_meshes`, displayed as a table in terminals and notebooks.

    Attributes:
      experiment: Full name of the experiment.
      meshes: Maps the name of each mesh to its number of devices along each axis.
      comparisons: All comparisons, in the order in which they were made.
      notes: Messages about what was not checked or cannot be exact.
      not_certified: Original sizes that --shrink reduced, such as "model_dims 4096 (32 was
        checked)".
      first_difference: The first difference, or None if all comparisons passed.
    """

    experiment: str
    meshes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    comparisons: list[Comparison] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    not_certified: list[str] = dataclasses.field(default_factory=list)
    first_difference: FirstDifference | None = None

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}"

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        cells = [_row("th", head), *(_row("td", row) for row in rows)]
        color = "#2e8b57" if self.certified else "#d1495b"
        return (
            f'<div><b>{html.escape(self.experiment)}</b>: <span style="color:{color}">'
            f"{html.escape(self.summary())}</span><table>{''.join(cells)}</table></div>"
        )

    @property
    def certified(self) -> bool:
        """Whether all comparisons are within their tolerances."""
        return self.first_difference is None and all(x.is_equal for x in self.comparisons)

    def rows(self) -> list[tuple[Comparison, int]]:
        """Returns (worst comparison, number of comparisons) for each mesh and kind.

        The worst comparison is the one with the largest `share`.
        """
        groups: dict[tuple[str, str], list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault((comparison.mesh, comparison.kind), []).append(comparison)
        return [(max(group, key=lambda x: x.share), len(group)) for group in groups.values()]

    def table(self) -> str:
        """Returns a text table with one line for each mesh and kind."""
        return "\n".join(table_lines(self._cells(), right=(2, 3, 4)))

    def _cells(self) -> list[tuple[str, ...]]:
        header: tuple[str, ...] = ("mesh", "kind", "number", "difference", "tolerance", "why")
        return [header] + [
            (
                worst.mesh,
                worst.kind,
                f"{count:,}",
                _number(worst.difference),
                _number(worst.tolerance),
                worst.why if worst.is_equal else f"DIFFERS at {_leaf_and_step(worst)}",
            )
            for worst, count in self.rows()
        ]

    def summary(self) -> str:
        """Returns a one-line summary: counts if certified, otherwise the first difference."""
        if self.certified:
            num_meshes = f"{len(self.meshes)} mesh{'' if len(self.meshes) == 1 else 'es'}"
            counts = f"{len(self.comparisons):,} comparisons on {num_meshes}"
            sizes = ", ".join(self.not_certified)
            return f"certified: {counts}" + (f"; not certified: {sizes}" if sizes else "")
        return f"not certified: {self.first_difference}"

    def json_text(self) -> str:
        """Returns the contents of the file that `--json` writes."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Returns the certificate as JSON values."""
        first = self.first_difference
        return {
            "experiment": self.experiment,
            "certified": self.certified,
            "num_comparisons": len(self.comparisons),
            "comparisons": [
                {**finite_fields(dataclasses.asdict(worst)), "number": count}
                for worst, count in self.rows()
            ],
            "meshes": [{"name": name, "shape": shape} for name, shape in self.meshes.items()],
            "notes": self.notes,
            "not_certified": self.not_certified,
            "first_difference": None if first is None else finite_fields(dataclasses.asdict(first)),
        }


def _row(tag: str, cells: Sequence[str]) -> str:
    style = ' style="text-align:left"'
    return f"<tr>{''.join(f'<{tag}{style}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> dict[str, float]:
    """Returns the largest absolute difference in each leaf.

    If only one of the mappings contains a leaf, the difference is infinity.
    """
    names = [*expected, *(name for name in actual if name not in expected)]
    return {
        name: _difference(expected[name], actual[name])
        if name in expected and name in actual
        else math.inf
        for name in names
    }


def _difference(expected: Any, actual: Any) -> float:
    expected, actual = np.asarray(expected), np.asarray(actual)
    if expected.shape != actual.shape:
        return math.inf
    if not expected.size:
        return 0.0
    if not np.issubdtype(expected.dtype, np.inexact):
        return float(np.max(np.abs(expected.astype(np.float64) - actual.astype(np.float64))))
    # Two NaNs, or two equal infinities, are no difference.
    is_same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
    with np.errstate(invalid="ignore"):
        difference = np.where(is_same, 0.0, np.abs(expected - actual))
    return math.inf if np.isnan(difference).any() else float(difference.max())


def largest(x: Any) -> float:
    """Returns the largest finite absolute value in an array, or 0.0 if there is none."""
    x = np.abs(np.asarray(x, np.float64))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def _leaf_and_step(comparison: Comparison) -> str:
    return comparison.leaf + ("" if comparison.step is None else f", step {comparison.step}")


def _number(x: float) -> str:
    return f"{x:.2g}" if x else "0"


def finite_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Converts infinities and NaNs to strings, because JSON does not support them."""
    is_infinite = lambda x: isinstance(x, float) and not math.isfinite(x)  # noqa: E731
    return {key: str(x) if is_infinite(x) else x for key, x in fields.items()}


def mesh_name(shape: Mapping[str, int]) -> str:
    """Returns the name of a mesh, such as "data 4, mdl 2", or "one device" for a single device."""
    split = [f"{axis} {size}" for axis, size in shape.items() if size > 1]
    return ", ".join(split) or "one device"


def split_axes(shape: Mapping[str, int]) -> Sequence[str]:
    """Returns the mesh axes with more than one device."""
    return [axis for axis, size in shape.items() if size > 1]
