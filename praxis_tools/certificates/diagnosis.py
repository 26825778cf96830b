"""Where a difference has its cause: the device, or the axis and the layer of the program."""

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
from praxis_tools.certificates.certifier import (
    CertifiedStep,
    Certifier,
    differ_anywhere,
)
from praxis_tools.certificates.placements import reordered, reshaped, rolled
from praxis_tools.certificates.rerun import MOVED, Measures, Rerun, Rows
from praxis_tools.certificates.state_digests import Digests, differing
from praxis_tools.certificates.update import UpdateComparison
from praxis_tools.check import tolerances
from praxis_tools.check.bisect import (
    REFUSALS,
    first_of_layers,
    layer_of,
    layer_of_key,
)
from praxis_tools.check.certificate import (
    Comparison,
    finite_fields,
    mesh_name,
    split_axes,
)
from praxis_tools.check.runs.float64 import Float64Run, widened
from praxis_tools.check.runs.layer_recorder import LayerRecorder
from praxis_tools.check.runs.on_mesh import Leaves
from praxis_tools.check.runs.states import NUDGE
from praxis_tools.explain.hlo_layers import GRADIENT_OF

DEVICE, PROGRAM = "device", "program"
_NUM_DRAWS = 5


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference that a certificate found.

    Attributes:
      cause: "device" or "program".
      what: the kind of thing that differs: "replicas", "restored state", "gradients", "loss",
        "update of weights", "update of slots".
      device: as text, with its process; "" if the cause is the program, or unknown.
      axis: of the mesh, joined by "+": those along which copies differ, or that must be split for
        it to be seen; of a device that computes wrongly its place along each. "" if none is.
      layer: the path of the first layer that differs; "" if unknown.
      leaf: the path of the array that differs most there.
      mesh: the name of the mesh on which it differs.
      difference, tolerance: of that leaf.
    """

    cause: str
    what: str
    device: str
    axis: str
    layer: str
    leaf: str
    mesh: str
    difference: float = 1.0
    tolerance: float = 0.0

    def __str__(self) -> str:
        where = f"layer {self.layer or 'unknown'}, leaf {self.leaf}"
        place = self.device or ("a device" if self.cause == DEVICE else "the program")
        axis = f", axis {self.axis}" if self.axis else ""
        return (
            f"{self.what}: {place}{axis}, {where}; mesh {self.mesh}; differs by "
            f"{self.difference:.3g}, tolerance {self.tolerance:.3g}"
        )


def device_text(mesh: Mesh, places: Iterable[int]) -> str:
    """Returns the names of devices, from their positions in the mesh's order."""
    devices = mesh.devices.reshape(-1)
    return " and ".join(
        f"device {devices[i].id} ({devices[i].device_kind}) of process {devices[i].process_index}"
        for i in places
    )


def place_text(mesh: Mesh, place: int) -> str:
    """Returns the place of a device along each axis with several, "data 3, mdl 1"."""
    where = np.unravel_index(place, mesh.devices.shape)
    return ", ".join(
        f"{axis} {int(i)}" for axis, i in zip(mesh.axis_names, where, strict=True)
        if mesh.shape[axis] > 1
    )


def of_copies(layout: StateLayout, mesh: Mesh, digests: Digests) -> list[Difference]:
    """Returns the differences between copies of an array on several devices."""
    return [
        Difference(
            DEVICE, "replicas", device_text(mesh, x.places), "+".join(x.axes),
            layer_of_leaf(layout, x.leaf), x.leaf, mesh_name(mesh.shape),
        )
        for x in digests.stale()
    ]


def of_restored(
    layout: StateLayout, mesh: Mesh, saved: Mapping[str, Any], digests: Digests
) -> list[Difference]:
    """Returns the differences of a state from the state that was saved.

    The devices are known if the mesh is the one that it was saved on, or if copies differ.

    Args:
      saved: what `Digests.to_save` returned of it.
    """
    places = []
    if saved["mesh"] == dict(mesh.shape):
        before, now = (dict(enumerate(x)) for x in (saved["places"], digests.by_place()))
        places = differing(before, now)
    axes = "+".join(split_axes(mesh.shape))
    return [
        Difference(
            DEVICE, "restored state", device_text(mesh, places), axes, layer_of_leaf(layout, leaf),
            leaf, mesh_name(mesh.shape),
        )
        for leaf in differing(saved["leaves"], digests.by_leaf)
    ]


def layer_of_leaf(layout: StateLayout, leaf: str) -> str:
    """Returns the layer of an array of a state, or of a gradient."""
    start = "mdl_vars/params/"
    paths = [x.path.removeprefix(start) for x in layout.leaves() if x.path.startswith(start)]
    return layer_of(leaf, paths)


class Search:
    """Looks for the cause of a difference, by re-running the step elsewhere.

    Args:
      certifier: of the job.
      certified: the certificate.
    """

    def __init__(self, certifier: Certifier, certified: CertifiedStep):
        self._certifier, self._certified, self._rows = certifier, certified, certified.rows
        self._own, self._mesh = certifier.reruns[0], certifier.own.mesh
        self._layout = certifier.own.layout

    def difference(self) -> Difference:
        """Returns the first difference of the certificate, with its cause.

        A process that found no difference joins the search and returns its first comparison.
        """
        certified = self._certified
        if certified.update is not None:
            return self._of_update(certified.update)
        moved = [x for x in certified.failed if x.mesh == MOVED]
        if certified.is_of_device or differ_anywhere(moved):
            return self._of_device(moved or certified.comparisons[:1])
        return self._of_program(certified.failed or certified.comparisons[-1:])

    def _of_update(self, update: UpdateComparison) -> Difference:
        """Returns the difference of a wrong update; of one device if the others are right."""
        worst = next(iter(update.failed), update.comparisons[-1])
        places = update.places.get(worst.leaf, ())
        is_of_device = 0 < 2 * len(places) <= self._mesh.size
        found = self._located([worst], "", places if is_of_device else ())
        return dataclasses.replace(found, what=f"update of {worst.what}")

    def _located(
        self, failed: Sequence[Comparison], layer: str, places: Sequence[int], axes: str = ""
    ) -> Difference:
        """Returns the difference of the leaf that differs most, in the layer if one is known.

        Args:
          places: of the devices that are its cause; (): the program is.
        """
        here = [x for x in failed if layer and f"/{layer}/" in f"/{x.leaf}/"]
        first = [x for x in failed if x.what == failed[0].what]
        leaf = max(here or first, key=lambda item: (item.share, item.difference))
        return Difference(
            DEVICE if places else PROGRAM, leaf.what, device_text(self._mesh, places),
            place_text(self._mesh, places[0]) if len(places) == 1 else axes,
            layer or layer_of_leaf(self._layout, leaf.leaf), leaf.leaf,
            mesh_name(self._mesh.shape), leaf.difference, leaf.tolerance,
        )

    # A device: its errors move with it.

    def _of_device(self, failed: Sequence[Comparison]) -> Difference:
        places, layer = list(range(self._mesh.size)), ""
        with contextlib.suppress(*REFUSALS):  # Such as a lack of memory for one more program.
            places = self._wrong_places()
        if len(places) == 1:
            (place,) = places
            moved = self._with_rolled([place, (place + 1) % self._mesh.size])
            if rows := self._differing_rows(moved):
                with contextlib.suppress(*REFUSALS):  # Its layers cannot be looked at.
                    layer = _first_layer_moved(self._own, moved, rows)
        return self._located(failed, layer, places)

    def _wrong_places(self) -> list[int]:
        """Returns the places of the devices that compute something else than the others.

        The errors of a device move with it: exchanging devices changes the result if one of them is
        wrong. Returns all places if the same devices in the same places do not repeat a result.
        """
        every = list(range(self._mesh.size))
        if self._differing_rows(self._own) is not None:
            return every
        right: list[int] = []

        def suspects(places: list[int]) -> list[int]:
            if len(places) <= 1:
                return places
            if len(places) < len(every) and not self._differs(places):
                right.extend(places)
                return []
            middle = len(places) // 2
            return suspects(places[:middle]) + suspects(places[middle:])

        alone = suspects(every)
        if not right:
            pairs = itertools.combinations(alone, 2)
            right = next((list(pair) for pair in pairs if not self._differs(list(pair))), [])
        wrong = [x for x in alone if x not in right and right and self._differs([x, right[0]])]
        return wrong or alone or every

    def _differs(self, places: Sequence[int]) -> bool:
        """Returns True if the result changes with the devices at these places moved round."""
        return self._differing_rows(self._with_rolled(places)) is not None

    def _with_rolled(self, places: Sequence[int]) -> Rerun:
        return self._on(reordered(self._mesh, rolled(places, self._mesh.size)))

    def _differing_rows(self, rerun: Rerun) -> Rows | None:
        """Returns rows whose results differ between a re-run and that on the job's mesh, or None.

        Of several draws, because the rows of a device may have no weight.
        """
        for rows, expected, nudged in self._draws:
            actual = rerun.measure(rows)
            if differ_anywhere(self._certifier.compare_order(expected, nudged, actual)):
                return rows
        return None

    @functools.cached_property
    def _draws(self) -> list[tuple[Rows, Measures, list[Measures]]]:
        """Rows of several draws, their measures, and those with weights moved by rounding."""
        own, drawn = self._own, self._certified.drawn
        rows = [self._rows, *(drawn(draw) for draw in range(10, 10 + _NUM_DRAWS))]
        return [(item, own.measure(item), [own.measure(item, own.rounding)]) for item in rows]

    def _on(self, mesh: Mesh) -> Rerun:
        return self._certifier.rerun_on(self._certifier.build(mesh))

    # The program: meshes that split a single axis show the axis.

    def _of_program(self, failed: Sequence[Comparison]) -> Difference:
        axes, layer = self._axes(), ""
        with contextlib.suppress(*REFUSALS):  # Its layers cannot be looked at.
            other = self._certifier.reruns[-1]
            layer = _first_layer_of_mesh(other, self._own, self._rows)
        return self._located(failed, layer, (), "+".join(axes))

    def _axes(self) -> list[str]:
        """Returns the axes of the job's mesh that alone, with all devices along them, differ."""
        own = split_axes(self._mesh.shape)
        if len(own) == 1:
            return list(own)
        wrong = []
        for axis in own:
            shape = [self._mesh.size if x == axis else 1 for x in self._mesh.axis_names]
            try:
                actual = self._on(reshaped(self._mesh, shape)).measure(self._rows)
            except REFUSALS:
                continue
            if self._is_wrong(actual):
                wrong.append(axis)
        return wrong or list(own)

    def _is_wrong(self, actual: Measures) -> bool:
        """Returns True if measures are not those of the other mesh."""
        own, other = self._certified.own, self._certified.other
        # How much rounding moves is known of the job's own mesh.
        nudged = [
            {k: x + item.leaves[k] - own.leaves[k] for k, x in other.leaves.items()}
            for item in self._certified.nudged
        ]
        return differ_anywhere(tolerances.by_rounding("", other.leaves, nudged, actual.leaves))


def _first_layer_moved(one: Rerun, other: Rerun, rows: Rows) -> str:
    """Returns the layer whose bits differ first between two orders of the devices, or ""."""

    def digest(x: jax.Array) -> jax.Array:
        return element_hash.digest(x, element_hash.indices(x.shape, x.shape))

    expected, actual = (_records(item, rows, LayerRecorder(digest)) for item in (one, other))
    for key in sorted(expected):
        layer = layer_of_key(key).removeprefix(GRADIENT_OF)
        if layer and key in actual and not np.array_equal(expected[key], actual[key]):
            return layer
    return ""


def _first_layer_of_mesh(expected: Rerun, actual: Rerun, rows: Rows) -> str:
    """Returns the layer that differs first between two meshes in float64, or "".

    It is "" too on devices that have no float64.
    """
    if expected.mesh.devices.flat[0].platform == "tpu":
        return ""
    by_hand = actual.partitioner.gradients.num_parts is not None
    with jax.enable_x64(True):
        return first_of_layers(
            _records(expected, rows, Float64Run()), _records(expected, rows, Float64Run(), NUDGE),
            _records(actual, rows, Float64Run()), (GRADIENT_OF,) if by_hand else (),
        )


def _records(rerun: Rerun, rows: Rows, run: LayerRecorder, nudge: float = 0.0) -> Leaves:
    """Returns the records of a step's layers, by "NUMBER|LAYER"."""
    with jax.enable_x64(False):
        given = rerun.arguments(rows, nudge)
        closed = jax.make_jaxpr(rerun.function)(*given)

    def recorded(*args: Any) -> dict[str, jax.Array]:
        leaves = jax.tree.leaves(args)
        run.call(closed, list(map(widened, leaves)) if isinstance(run, Float64Run) else leaves)
        return run.records

    return jax.device_get(jax.jit(recorded, out_shardings=rerun.partitioner.replicated)(*given))


def as_json(difference: Difference | None) -> Mapping[str, Any] | None:
    """Returns a difference as values for JSON."""
    return None if difference is None else finite_fields(dataclasses.asdict(difference))
