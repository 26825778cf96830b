"""Comparisons with their differences and tolerances, as a table, a summary line and JSON."""

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
    """A comparison of an array, or of a number.

    Attributes:
      mesh: its name, such as "data 4, mdl 2".
      what: the kind of thing, such as "gradients".
      leaf: which of them: a weight's path, a metric's name.
      step: the training step, from 0, or None.
      difference: the largest absolute difference of an element; inf where shapes differ or only
        one of the two is a NaN.
      tolerance: the most that it may be.
      why: the reason of the tolerance.
    """

    mesh: str
    what: str
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
        """The difference as a share of the tolerance."""
        if self.tolerance == 0:
            return math.inf if self.difference else 0.0
        return self.difference / self.tolerance


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first comparison that failed, and where its cause was found.

    Attributes:
      axis: the mesh axes that must be split for it to be seen, joined by "+"; None if it is seen
        on one device.
      layer: the path of the layer in which values differ first; "" if unknown.
      others: see `Comparison`.
    """

    what: str
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
        parts += [f"axis {self.axis}" if self.axis else "on one device already"]
        return (
            f"{self.what}: {', '.join(parts)}; mesh {self.mesh}; differs by {self.difference:.3g}, "
            f"tolerance {self.tolerance:.3g}"
        )


@dataclasses.dataclass
class Certificate:
    """What `check_on_meshes` returns: it prints as a table, and a notebook shows it as such.

    Attributes:
      experiment: its full name.
      meshes: by name, the number of devices along each axis.
      comparisons: in the order in which they were made.
      notes: what was left out or is not exact by nature, in sentences.
      not_certified: the experiment's own sizes in whose place smaller ones were checked, such as
        "model_dims 4096 (32 was checked)".
      first_difference: None if all are equal.
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
        return self.first_difference is None and all(item.is_equal for item in self.comparisons)

    def rows(self) -> list[tuple[Comparison, int]]:
        """Returns for each mesh and kind the comparison nearest to its tolerance, and how many."""
        groups: dict[tuple[str, str], list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault((comparison.mesh, comparison.what), []).append(comparison)
        return [(max(same, key=lambda item: item.share), len(same)) for same in groups.values()]

    def table(self) -> str:
        """Returns a line of text for each mesh and kind."""
        return "\n".join(table_lines(self._cells(), right=(2, 3, 4)))

    def _cells(self) -> list[tuple[str, ...]]:
        lines = [("mesh", "what", "number", "difference", "tolerance", "why")]
        lines += [
            (item.mesh, item.what, f"{number:,}", _number(item.difference), _number(item.tolerance),
             item.why if item.is_equal else f"DIFFERS at {_place(item)}")
            for item, number in self.rows()
        ]
        return lines

    def summary(self) -> str:
        """Returns the last line: what was certified, or what differs first."""
        if self.certified:
            done = f"{len(self.comparisons):,} comparisons on {len(self.meshes)} meshes"
            sizes = ", ".join(self.not_certified)
            return f"certified: {done}" + (f"; not certified: {sizes}" if sizes else "")
        return f"not certified: {self.first_difference}"

    def json_text(self) -> str:
        """Returns the file that `--json` writes."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Returns the certificate as values for JSON."""
        first = self.first_difference
        return {
            "experiment": self.experiment,
            "certified": self.certified,
            "num_comparisons": len(self.comparisons),
            "comparisons": [
                {**finite_fields(dataclasses.asdict(item)), "number": number}
                for item, number in self.rows()
            ],
            "meshes": [{"name": name, "shape": shape} for name, shape in self.meshes.items()],
            "notes": self.notes,
            "not_certified": self.not_certified,
            "first_difference": None if first is None else finite_fields(dataclasses.asdict(first)),
        }


def _row(tag: str, cells: Sequence[str]) -> str:
    style = ' style="text-align:left"'
    return f"<tr>{''.join(f'<{tag}{style}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any]
) -> dict[str, float]:
    """Returns by leaf the largest absolute difference; inf for a leaf of only either of them."""
    names = [*expected, *(name for name in actual if name not in expected)]
    return {
        name: _difference(expected[name], actual[name])
        if name in expected and name in actual else math.inf
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
    same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(expected - actual))
    return math.inf if np.isnan(apart).any() else float(apart.max())


def largest(x: Any) -> float:
    """Returns the largest finite absolute value of an array, or 0.0."""
    x = np.abs(np.asarray(x, np.float64))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def _place(comparison: Comparison) -> str:
    return comparison.leaf + ("" if comparison.step is None else f", step {comparison.step}")


def _number(x: float) -> str:
    return f"{x:.2g}" if x else "0"


def finite_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Converts infinities and NaNs, which JSON does not support, to text."""
    is_infinite = lambda x: isinstance(x, float) and not math.isfinite(x)  # noqa: E731
    return {key: str(x) if is_infinite(x) else x for key, x in fields.items()}


def mesh_name(shape: Mapping[str, int]) -> str:
    """Returns the name of a mesh, "data 4, mdl 2", or "one device" if it splits nothing."""
    split = [f"{axis} {size}" for axis, size in shape.items() if size > 1]
    return ", ".join(split) or "one device"


def split_axes(shape: Mapping[str, int]) -> Sequence[str]:
    """Returns the axes of a mesh along which there are several devices."""
    return [axis for axis, size in shape.items() if size > 1]
