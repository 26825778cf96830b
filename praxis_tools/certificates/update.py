"""The update of a step, recomputed: each array of the new state, compared on each device.

The state after a step is compared with two others. The job's own program, run once more from a
copy of the state before, gives the same bits: so one wrong bit on one device is found. The update
by hand (`recomputed_update`) is another program: so a program that updates wrongly is found, up to
rounding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import OutOfMemory, format_bytes
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import LeafLayout, TrainState
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, abstract_global_batch
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.core.sharding.memory_spaces import to_device
from praxis_lite.core.sharding.padding import pad_tree
from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_lite.core.xla_workarounds.narrow_scans import narrow_scans
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.host.host_memory import available_bytes
from praxis_tools.certificates.recomputed_update import Rounding, path_ends, recomputed
from praxis_tools.certificates.rerun import Measures, check_room
from praxis_tools.certificates.state_digests import StateDigests
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison

PyTree = Any
UPDATE = "update"
# Bytes of slots and averages that a device may always keep for a certificate.
LEAST_BYTES = 2**30
_NUDGES = 8
_SAME_BITS, _BY_HAND = "the same program, the same bits", "by hand: what rounding moves"


@dataclasses.dataclass(frozen=True)
class UpdateComparison:
    """The state after a step, compared with the recomputed one.

    Attributes:
      comparisons: one for each array and kind of answer.
      places: by path of an array that differs, the devices that differ, in the mesh's order.
      num_arrays, of_arrays: how many arrays were compared by hand, of how many.
      is_exact: the bits were compared, of all arrays.
    """

    comparisons: Sequence[Comparison]
    places: Mapping[str, tuple[int, ...]]
    num_arrays: int
    of_arrays: int
    is_exact: bool

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [x for x in self.comparisons if not x.is_equal]


class UpdateCheck:
    """Recomputes updates of a job that trains, in turn for all arrays of its state.

    Args:
      own: the task on the job's mesh.
      element_spec: the shapes of a batch's rows.
      note: called with a sentence about what cannot be compared.
      most_bytes: of slots and averages that a device keeps for a certificate; those of the largest
        weight are always kept. None: as many as the weights have, at least LEAST_BYTES.

    Attributes:
      parts: the paths of the arrays that a certificate compares, for one certificate after the
        other.
      is_exact: the bits are compared, because a copy of the complete state is kept.
    """

    def __init__(
        self, own: Partitioner, element_spec: PyTree, note: Callable[[str], None],
        most_bytes: int | None = None,
    ):
        self._own, self._layout, self._spec = own, own.layout, element_spec
        self._leaves = {leaf.path: leaf for leaf in own.layout.leaves()}
        self.parts = _parts(own, self._leaves, most_bytes)
        self.is_exact = len(self.parts) == 1
        self._note = note
        self._programs: dict[int, Any] = {}
        self._digests = StateDigests(own.layout, own.mesh) if self.is_exact else None
        self._turn, self._kept, self._kept_step = 0, None, None
        self._has_repeated = False
        self.lower()

    @property
    def _part(self) -> int:
        """The number of the part that the next certificate compares."""
        return self._turn % len(self.parts)

    def lower(self) -> None:
        """Traces the program of the next certificate's part."""
        if self._part not in self._programs:
            self._programs[self._part] = self._lowered(self.parts[self._part])

    def compile(self) -> jax.stages.Compiled:
        """Compiles what was traced; it may be called in another thread."""
        part = self._part
        if isinstance(self._programs[part], jax.stages.Lowered):
            self._programs[part] = self._programs[part].compile()
            if self._digests is not None:
                self._digests.compile()
        return self._programs[part]

    def check_memory(self) -> None:
        """Raises OutOfMemory if the devices cannot hold what the comparison computes."""
        check_room(self.compile(), self._own.mesh.local_devices, "An update that is recomputed")

    def check_copy(self) -> None:
        """Raises OutOfMemory if the devices cannot keep the copy through a training step."""
        needed = sum(self._leaves[path].bytes_per_device for path in self._to_keep())
        devices = self._own.mesh.local_devices
        if devices[0].platform == "cpu":
            left = available_bytes() / len(devices)
        else:
            memory = [device.memory_stats() or {} for device in devices]
            left = min(x.get("bytes_limit", math.inf) - x.get("peak_bytes_in_use", 0)
                       for x in memory)
        if needed > left:
            raise OutOfMemory(
                f"A copy of the state before a step takes {format_bytes(needed)} on each device, "
                f"and {format_bytes(int(left))} are free."
            )

    def keep(self, state: TrainState, step: int) -> None:
        """Copies the part of the state that is recomputed, before the next step donates it."""
        kept = self._to_keep()
        self._kept_step = step
        self._kept = {path: x.copy() for path, x in leaves_with_path(state) if path in kept}

    def drop(self) -> None:
        """Frees the copy."""
        self._kept = self._kept_step = None

    def has(self, step: int) -> bool:
        """Returns True if the state before a step was kept."""
        return self._kept_step == step - 1

    def compare(
        self, state: TrainState, batch: GlobalBatch, key: jax.Array, own: Measures,
        nudged: Measures, salt: int, rounding: float, agree: Callable[[bool], bool],
    ) -> UpdateComparison:
        """Compares a state with the one recomputed from the state that was kept; frees that.

        Args:
          state: after the step.
          batch: all its rows.
          own, nudged: measures of gradients on a few of them, and with weights moved by rounding.
          salt: a seed of random signs.
          rounding: the unit by which weights are moved to measure rounding by.
          agree: returns whether its argument is True in any process.
        """
        paths = self.parts[self._part]
        kept, self._kept = self._kept, None
        before = jax.tree.map_with_path(lambda p, x: kept.get(path_of(p), x), state)
        shares = np.array(_shares(own, nudged, self._trained), np.float32)
        run = self.compile()

        def compared_by_hand(num_nudges: int) -> np.ndarray:
            numbers = shares, np.int32(num_nudges), np.float32(rounding), np.uint32(salt)
            numbers = jax.device_put(numbers, self._own.replicated)
            return np.asarray(run(before, state, batch, key, *numbers))

        apart = compared_by_hand(0)
        if agree(bool((apart[..., 0] > 1).any())):
            # The shares are of a few rows: measure the rounding of the whole batch's gradients.
            apart = compared_by_hand(_NUDGES)
        comparisons, places = [], {}
        for number, path in enumerate(paths):
            worst = apart[np.argmax(apart[:, number, 0]), number]
            comparisons.append(Comparison(
                UPDATE, tolerances.kind_of(path), path, None, float(worst[1]), float(worst[2]),
                _BY_HAND,
            ))
            if worst[0] > 1:
                places[path] = tuple(np.flatnonzero(apart[:, number, 0] > 1).tolist())
        if self.is_exact:
            exact, wrong = self._bits(before, state, batch, key)
            # First, for they name the device.
            comparisons, places = [*exact, *comparisons], {**places, **wrong}
        self._turn += 1
        return UpdateComparison(
            comparisons, places, len(paths), len(self._leaves), is_exact=self.is_exact
        )

    def _bits(
        self, before: TrainState, state: TrainState, batch: GlobalBatch, key: jax.Array
    ) -> tuple[list[Comparison], dict[str, tuple[int, ...]]]:
        """Compares bits with those of the job's own program, which `before` is donated to."""
        run = self._own.train_step.program
        expected, actual = self._digests(run(before, batch, key)[0]), self._digests(state)
        wrong = dict(expected.apart(actual))
        if wrong and not self._has_repeated:
            # Does the program give the same bits twice? Run any step twice from one state.
            copies = (jax.tree.map(lambda x: x.copy(), state) for _ in range(2))
            first, second = (self._digests(run(copy, batch, key)[0]) for copy in copies)
            if list(first.apart(second)):
                self.is_exact = False
                self._note(
                    "The training step does not give the same bits twice, so updates are compared "
                    "up to rounding only."
                )
                return [], {}
        self._has_repeated = True
        return [
            Comparison(
                UPDATE, tolerances.kind_of(path), path, None, float(path in wrong), 0.0, _SAME_BITS
            ) for path in self._leaves
        ], wrong

    @property
    def _trained(self) -> list[str]:
        groups = self._own.learner.groups.by_name.values()
        return ["/".join(path) for group in groups for path in group.paths]

    def _to_keep(self) -> set[str]:
        paths = self.parts[self._part]
        # Gradients depend on all weights, and on the scale of the loss.
        return {
            path for path in self._leaves
            if path in paths or path.startswith(("mdl_vars/", "opt_states/loss_scale/"))
        }

    def _lowered(self, paths: Sequence[str]) -> jax.stages.Lowered:
        own, mesh, replicated = self._own, self._own.mesh, self._own.replicated
        state = self._layout.abstract(mesh)
        run = jax.jit(
            without_xla_errors(functools.partial(self._apart, paths), also=narrow_scans),
            in_shardings=(*(self._layout.shardings(mesh),) * 2, None, *(replicated,) * 5),
            out_shardings=replicated, compiler_options=own.compiler_options,
        )
        numbers = (
            jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((len(self._trained),), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.uint32),
        )
        numbers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), numbers
        )
        traced = run.trace(state, state, abstract_global_batch(self._spec, mesh), *numbers)
        return mended(traced.lower(), mesh)

    def _apart(
        self, paths: Sequence[str], before: TrainState, state: TrainState, batch: GlobalBatch,
        key: jax.Array, shares: jax.Array, *rounding: jax.Array,
    ) -> jax.Array:
        """Returns [devices, arrays, 3]: share of the tolerance, difference and tolerance.

        They are those of the element with the largest share in each device's block.
        """
        own, mesh = self._own, self._own.mesh
        by_weight = {path: shares[i] for i, path in enumerate(self._trained)}
        with own.where.tracing():
            expected, allowed = recomputed(
                own, self._layout.unpad(before), own.where.inputs(batch), key,
                Rounding(by_weight, *rounding), chosen=set(paths),
                actual_num_skipped=state.opt_states["num_skipped_steps"],
            )
        actual = dict(leaves_with_path(to_device(state)))
        specs = [self._leaves[path].spec for path in paths]

        def blocks_of(tree: Mapping[str, jax.Array]) -> list[jax.Array]:
            leaves = [_as_numbers(tree[path]) for path in paths]
            return [
                pad_tree(x, spec, self._layout.axis_sizes) if x.ndim == len(spec) else x
                for x, spec in zip(leaves, specs, strict=True)
            ]

        # The data of keys have a dim more.
        specs = [
            PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))
            for x, spec in zip(blocks_of(expected), specs, strict=True)
        ]
        return jax.shard_map(
            lambda *blocks: jnp.stack(list(map(_worst, *blocks)))[None], mesh=mesh,
            in_specs=(specs,) * 3, out_specs=PartitionSpec(mesh.axis_names), check_vma=False,
        )(blocks_of(expected), blocks_of(actual), blocks_of(allowed))


def _worst(expected: jax.Array, actual: jax.Array, allowed: jax.Array) -> jax.Array:
    if not expected.size:
        return jnp.zeros(3, jnp.float32)
    same = (expected == actual) | ((expected != expected) & (actual != actual))
    if jnp.issubdtype(expected.dtype, jnp.floating):
        apart = jnp.abs(actual.astype(jnp.float32) - expected.astype(jnp.float32))
    else:
        larger, smaller = jnp.maximum(actual, expected), jnp.minimum(actual, expected)
        apart = (larger - smaller).astype(jnp.float32)
    apart = jnp.where(same, 0.0, jnp.where(jnp.isnan(apart), jnp.inf, apart))
    allowed = jnp.broadcast_to(allowed, apart.shape)
    share = jnp.where(apart == 0, 0.0, jnp.where(allowed > 0, apart / allowed, jnp.inf))
    share = jnp.where(jnp.isnan(share), jnp.where(apart < jnp.inf, 0.0, jnp.inf), share)
    at = jnp.argmax(share)
    return jnp.stack([x.reshape(-1)[at] for x in (share, apart, allowed)])


def _as_numbers(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _shares(own: Measures, nudged: Measures, weights: Sequence[str]) -> list[float]:
    """Returns the share of each weight's gradient that rounding moves, from its projections."""
    shares = []
    for path in weights:
        norm, *projections = own.leaves[f"gradients/{path}"]
        apart = nudged.leaves[f"gradients/{path}"][1:] - np.array(projections)
        # The square of a projection by random signs is, on average, that of the norm.
        moved = float(np.sqrt(np.mean(np.square(apart))))
        shares.append(moved / float(norm) if norm > 0 else 0.0)
    usual = float(np.median(shares)) if shares else 0.0
    # By chance the projections of one may not move at all.
    return [min(max(x, usual), 1.0) if math.isfinite(x) else 1.0 for x in shares]


def _parts(
    own: Partitioner, leaves: Mapping[str, LeafLayout], most_bytes: int | None
) -> list[list[str]]:
    """Returns paths of weights with those of their slots, few enough to be copied at once."""
    groups = own.learner.groups.by_name.values()
    owners = {}
    for group in groups:
        for path in group.paths:
            # An optimizer that reads all of its weights updates them together.
            owner = path if group.stack_ranks is None else group.paths[0]
            owners["/".join(path)] = "/".join(owner)
    units: dict[str, list[str]] = {}
    for path in leaves:
        weight = next((end for end in path_ends(path)[1:] if end in owners), None)
        units.setdefault("" if weight is None else owners[weight], []).append(path)
    # Counts, frozen weights and running means: compared each time.
    always = units.pop("", [])

    def num_bytes(paths: Iterable[str], of_weights: bool = False) -> int:
        return sum(
            leaves[path].bytes_per_device for path in paths
            if path.startswith("mdl_vars/") == of_weights
        )

    if most_bytes is None:
        most_bytes = max(num_bytes(leaves, of_weights=True), LEAST_BYTES)
    bins: list[list[str]] = [[]]
    for unit in units.values():
        if bins[-1] and num_bytes([*bins[-1], *unit]) > most_bytes:
            bins.append([])
        bins[-1] += unit
    return [[*always, *paths] for paths in bins]
