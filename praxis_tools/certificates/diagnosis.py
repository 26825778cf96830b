"""Searches for the cause of a difference: a faulty device, or a mesh axis and a layer."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_tools.certificates import element_hash
from praxis_tools.certificates.certifier import CertifiedStep, Certifier
from praxis_tools.certificates.placements import reorder_devices, reshape_mesh, rotated_order
from praxis_tools.certificates.rerun import (
    MOVED,
    Measurements,
    Rerun,
    Rows,
    any_process_differs,
)
from praxis_tools.certificates.state_digests import Digests
from praxis_tools.certificates.update import UpdateComparison
from praxis_tools.check import tolerances
from praxis_tools.check.bisect import (
    MODEL_ERRORS,
    first_differing_layer,
    layer_of,
    layer_of_key,
)
from praxis_tools.check.certificate import (
    Comparison,
    finite_fields,
    mesh_name,
    split_axes,
)
from praxis_tools.check.runs.float64 import Float64Run, widen
from praxis_tools.check.runs.layer_recorder import LayerRecorder
from praxis_tools.check.runs.on_mesh import Leaves
from praxis_tools.check.runs.states import NUDGE
from praxis_tools.explain.hlo_layers import GRADIENT_OF

DEVICE, PROGRAM = "device", "program"
_NUM_DRAWS = 5


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference found by certifying a step or a restored state.

    Attributes:
      cause: "device" or "program".
      kind: The kind of values that differ: "replicas", "restored state", "gradients", "loss",
        "update of weights" or "update of slots".
      device: Description of the faulty device and its process; "" if the cause is unknown or is the
        program.
      axis: For a single faulty device, its position along each mesh axis. Otherwise, the mesh axes
        over which replicas differ, or that must be split for the difference to appear, joined by
        "+". May be "".
      layer: Path of the first layer that differs, or "" if it is unknown.
      leaf: Path of the array in `layer` with the largest difference.
      mesh: Name of the job's mesh.
      difference: The difference in this array.
      tolerance: The allowed difference.
    """

    cause: str
    kind: str
    device: str
    axis: str
    layer: str
    leaf: str
    mesh: str
    difference: float = 1.0
    tolerance: float = 0.0

    def __str__(self) -> str:
        location = f"layer {self.layer or 'unknown'}, leaf {self.leaf}"
        cause = self.device or ("a device" if self.cause == DEVICE else "the program")
        axis = f", axis {self.axis}" if self.axis else ""
        return (
            f"{self.kind}: {cause}{axis}, {location}; mesh {self.mesh}; differs by "
            f"{self.difference:.3g}, tolerance {self.tolerance:.3g}"
        )


def device_text(mesh: Mesh, positions: Iterable[int]) -> str:
    """Describes the devices at the given positions in a mesh."""
    devices = mesh.devices.reshape(-1)
    return " and ".join(
        f"device {devices[i].id} ({devices[i].device_kind}) of process {devices[i].process_index}"
        for i in positions
    )


def position_text(mesh: Mesh, position: int) -> str:
    """Returns a device's position along each axis of size above 1, such as "data 3, mdl 1"."""
    coordinates = np.unravel_index(position, mesh.devices.shape)
    return ", ".join(
        f"{axis} {int(i)}"
        for axis, i in zip(mesh.axis_names, coordinates, strict=True)
        if mesh.shape[axis] > 1
    )


def replica_differences(layout: StateLayout, mesh: Mesh, digests: Digests) -> list[Difference]:
    """Returns a difference for each array whose replicas are not equal."""
    return [
        Difference(
            DEVICE,
            "replicas",
            device_text(mesh, x.positions),
            "+".join(x.axes),
            layer_of_leaf(layout, x.leaf),
            x.leaf,
            mesh_name(mesh.shape),
        )
        for x in digests.replica_mismatches()
    ]


def restored_state_differences(
    layout: StateLayout, mesh: Mesh, saved: Mapping[str, Any], digests: Digests
) -> list[Difference]:
    """Returns a difference for each array that differs from the saved array.

    The devices that differ can only be identified if the state was saved on a mesh of the same
    shape.

    Args:
      layout: Layout of the state.
      mesh: Mesh on which the state was restored.
      saved: Digests saved with the state, from `Digests.to_save`.
      digests: Digests of the restored state.
    """
    positions: list[int] = []
    if saved["mesh"] == dict(mesh.shape):
        pairs = zip(saved["places"], digests.by_position(), strict=False)
        positions = [i for i, (expected, actual) in enumerate(pairs) if expected != actual]
    axes = "+".join(split_axes(mesh.shape))
    return [
        Difference(
            DEVICE,
            "restored state",
            device_text(mesh, positions),
            axes,
            layer_of_leaf(layout, leaf),
            leaf,
            mesh_name(mesh.shape),
        )
        for leaf, digest in saved["leaves"].items()
        if leaf in digests.by_leaf and digests.by_leaf[leaf] != digest
    ]


def layer_of_leaf(layout: StateLayout, leaf: str) -> str:
    """Returns the layer to which an array in a state or a gradient belongs."""
    prefix = "mdl_vars/params/"
    paths = [x.path.removeprefix(prefix) for x in layout.leaves() if x.path.startswith(prefix)]
    return layer_of(leaf, paths)


class CauseSearch:
    """Searches for the cause of a difference by re-running the step on other meshes.

    Args:
      certifier: The job's certifier.
      certified: A certificate with differences.
    """

    def __init__(self, certifier: Certifier, certified: CertifiedStep):
        self._certifier, self._certified, self._rows = certifier, certified, certified.rows
        self._job_rerun, self._mesh = certifier.reruns[0], certifier.partitioner.mesh
        self._layout = certifier.partitioner.layout

    def find(self) -> Difference:
        """Returns the first difference in the certificate, with its cause.

        All processes must call this, because the search runs steps on all devices. In a process
        without a difference, the first comparison is returned.
        """
        certified = self._certified
        if certified.update is not None:
            return self._update_difference(certified.update)
        reordered = [x for x in certified.failed if x.mesh == MOVED]
        if certified.is_device_fault or any_process_differs(reordered):
            return self._device_difference(reordered or certified.comparisons[:1])
        return self._program_difference(certified.failed or certified.comparisons[-1:])

    def _update_difference(self, update: UpdateComparison) -> Difference:
        """Returns the difference in an update.

        If the difference only occurs on a minority of the devices, these devices are reported as
        the cause.
        """
        worst = next(iter(update.failed), update.comparisons[-1])
        positions = update.positions.get(worst.leaf, ())
        is_device_fault = 0 < 2 * len(positions) <= self._mesh.size
        difference = self._worst_difference([worst], "", positions if is_device_fault else ())
        return dataclasses.replace(difference, kind=f"update of {worst.kind}")

    def _worst_difference(
        self, failed: Sequence[Comparison], layer: str, positions: Sequence[int], axes: str = ""
    ) -> Difference:
        """Returns the largest difference in `layer`, or in all layers if `layer` is "".

        Args:
          failed: The failed comparisons.
          layer: Path of the first layer that differs, or "" if it is unknown.
          positions: Positions of the faulty devices; () if the program is the cause.
          axes: Mesh axes that must be split for the difference to appear.
        """
        in_layer = [x for x in failed if layer and f"/{layer}/" in f"/{x.leaf}/"]
        same_kind = [x for x in failed if x.kind == failed[0].kind]
        worst = max(in_layer or same_kind, key=lambda x: (x.share, x.difference))
        return Difference(
            DEVICE if positions else PROGRAM,
            worst.kind,
            device_text(self._mesh, positions),
            position_text(self._mesh, positions[0]) if len(positions) == 1 else axes,
            layer or layer_of_leaf(self._layout, worst.leaf),
            worst.leaf,
            mesh_name(self._mesh.shape),
            worst.difference,
            worst.tolerance,
        )

    # Device faults: a device's errors move with it to other positions in the mesh.

    def _device_difference(self, failed: Sequence[Comparison]) -> Difference:
        positions, layer = list(range(self._mesh.size)), ""
        with contextlib.suppress(*MODEL_ERRORS):  # For instance, out of memory.
            positions = self._faulty_positions()
        if len(positions) == 1:
            (position,) = positions
            rotated = self._rerun_rotated([position, (position + 1) % self._mesh.size])
            if rows := self._differing_rows(rotated):
                with contextlib.suppress(*MODEL_ERRORS):  # The layers cannot be recorded.
                    layer = _first_layer_with_other_bits(self._job_rerun, rotated, rows)
        return self._worst_difference(failed, layer, positions)

    def _faulty_positions(self) -> list[int]:
        """Returns the mesh positions of the faulty devices.

        Rotating a set of devices changes the result if one of them is faulty, so faulty devices are
        found by binary search over sets of devices. If results are not reproducible even on the
        unchanged mesh, all positions are returned.
        """
        all_positions = list(range(self._mesh.size))
        if self._differing_rows(self._job_rerun) is not None:
            return all_positions
        correct: list[int] = []

        def suspects(positions: list[int]) -> list[int]:
            if len(positions) <= 1:
                return positions
            if len(positions) < len(all_positions) and not self._differs_if_rotated(positions):
                correct.extend(positions)
                return []
            middle = len(positions) // 2
            return suspects(positions[:middle]) + suspects(positions[middle:])

        # A single device cannot be rotated. Swap each remaining suspect with a correct device.
        candidates = suspects(all_positions)
        # Every set contained a faulty device. Look for two devices that are correct.
        if not correct:
            pairs = itertools.combinations(candidates, 2)
            correct = next(
                (list(pair) for pair in pairs if not self._differs_if_rotated(list(pair))), []
            )
        faulty = [
            x
            for x in candidates
            if x not in correct and correct and self._differs_if_rotated([x, correct[0]])
        ]
        return faulty or candidates or all_positions

    def _differs_if_rotated(self, positions: Sequence[int]) -> bool:
        """Returns whether rotating the devices at these positions changes the result."""
        return self._differing_rows(self._rerun_rotated(positions)) is not None

    def _rerun_rotated(self, positions: Sequence[int]) -> Rerun:
        order = rotated_order(positions, self._mesh.size)
        return self._rerun_on(reorder_devices(self._mesh, order))

    def _differing_rows(self, rerun: Rerun) -> Rows | None:
        """Returns rows for which a re-run differs from the run on the job's mesh, or None.

        Several samples of rows are compared, because all rows on a device may have weight 0.
        """
        for rows, expected, nudged in self._samples:
            actual = rerun.measure(rows)
            if any_process_differs(self._certifier.compare_reordered(expected, nudged, actual)):
                return rows
        return None

    @functools.cached_property
    def _samples(self) -> list[tuple[Rows, Measurements, list[Measurements]]]:
        """Returns samples of rows, each with measurements for exact and for perturbed weights."""
        rerun, draw_rows = self._job_rerun, self._certified.draw_rows
        samples = [self._rows, *(draw_rows(draw) for draw in range(10, 10 + _NUM_DRAWS))]
        return [
            (rows, rerun.measure(rows), [rerun.measure(rows, rerun.rounding)]) for rows in samples
        ]

    def _rerun_on(self, mesh: Mesh) -> Rerun:
        return self._certifier.rerun_on(self._certifier.build(mesh))

    # Program faults: re-run on meshes that split a single axis to find the axis that is the cause.

    def _program_difference(self, failed: Sequence[Comparison]) -> Difference:
        axes, layer = self._faulty_axes(), ""
        with contextlib.suppress(*MODEL_ERRORS):  # The layers cannot be recorded.
            other = self._certifier.reruns[-1]
            layer = _first_layer_with_other_values(other, self._job_rerun, self._rows)
        return self._worst_difference(failed, layer, (), "+".join(axes))

    def _faulty_axes(self) -> list[str]:
        """Returns each axis that reproduces the difference on a mesh that splits only this axis."""
        axes = split_axes(self._mesh.shape)
        if len(axes) == 1:
            return list(axes)
        faulty = []
        for axis in axes:
            shape = [self._mesh.size if x == axis else 1 for x in self._mesh.axis_names]
            try:
                actual = self._rerun_on(reshape_mesh(self._mesh, shape)).measure(self._rows)
            except MODEL_ERRORS:
                continue
            if self._differs_from_other_mesh(actual):
                faulty.append(axis)
        return faulty or list(axes)

    def _differs_from_other_mesh(self, actual: Measurements) -> bool:
        baseline, other = self._certified.baseline, self._certified.other
        assert other is not None  # A difference in the program was found on the other mesh.
        # Apply the effect of rounding, measured on the job's mesh, to the other mesh.
        nudged = [
            {k: x + perturbed.leaves[k] - baseline.leaves[k] for k, x in other.leaves.items()}
            for perturbed in self._certified.nudged
        ]
        return any_process_differs(tolerances.by_rounding("", other.leaves, nudged, actual.leaves))


def _first_layer_with_other_bits(rerun: Rerun, other: Rerun, rows: Rows) -> str:
    """Returns the first layer whose bits depend on the order of the devices, or ""."""

    def digest(x: jax.Array) -> jax.Array:
        return element_hash.digest(x, element_hash.indices(x.shape, x.shape))

    expected, actual = (_layer_records(x, rows, LayerRecorder(digest)) for x in (rerun, other))
    for key in sorted(expected):
        layer = layer_of_key(key).removeprefix(GRADIENT_OF)
        if layer and key in actual and not np.array_equal(expected[key], actual[key]):
            return layer
    return ""


def _first_layer_with_other_values(expected: Rerun, actual: Rerun, rows: Rows) -> str:
    """Returns the first layer whose float64 values differ between two meshes.

    Returns "" if no layer differs, or if the devices do not support float64.
    """
    if expected.mesh.devices.flat[0].platform == "tpu":
        return ""
    has_manual_gradients = actual.partitioner.gradient_functions.num_parts is not None
    with jax.enable_x64(True):
        return first_differing_layer(
            _layer_records(expected, rows, Float64Run()),
            _layer_records(expected, rows, Float64Run(), NUDGE),
            _layer_records(actual, rows, Float64Run()),
            (GRADIENT_OF,) if has_manual_gradients else (),
        )


def _layer_records(rerun: Rerun, rows: Rows, run: LayerRecorder, nudge: float = 0.0) -> Leaves:
    """Runs a step with a layer recorder, and returns the recorder's `records`."""
    with jax.enable_x64(False):
        arguments = rerun.arguments(rows, nudge)
        closed_jaxpr = jax.make_jaxpr(rerun.function)(*arguments)

    def record(*args: Any) -> dict[str, jax.Array]:
        leaves = jax.tree.leaves(args)
        if isinstance(run, Float64Run):
            leaves = list(map(widen, leaves))
        run.call(closed_jaxpr, leaves)
        return run.records

    jitted = jax.jit(record, out_shardings=rerun.partitioner.replicated)
    return jax.device_get(jitted(*arguments))


def as_json(difference: Difference | None) -> Mapping[str, Any] | None:
    """Converts a difference to JSON values, with infinities and NaNs as strings."""
    return None if difference is None else finite_fields(dataclasses.asdict(difference))
