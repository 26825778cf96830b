"""Recomputes the update of a step, and compares the new state on every device.

The state after a step is compared with two independent results:

- The job's compiled step runs again from a copy of the state before the step, and must produce the
  same bits. This reveals a single wrong bit on a single device.
- `recomputed_update` computes the same update with separate code. Both updates must be equal up to
  rounding errors. This reveals errors in the job's compiled step.
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
from praxis_lite.core.xla_workarounds.narrow_scans import narrow_scans
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.host.host_memory import available_bytes
from praxis_tools.certificates.recomputed_update import Rounding, path_suffixes, recompute_state
from praxis_tools.certificates.rerun import Measurements, any_process, check_device_memory
from praxis_tools.certificates.state_digests import StateDigests
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison

PyTree = Any
UPDATE = "update"
# Slots and moving averages in a snapshot may always use this many bytes per device.
LEAST_BYTES = 2**30
_NUDGES = 8
_SAME_BITS = "same compiled step: bitwise equal"
_RECOMPUTED = "recomputed update: within the effect of rounding"


@dataclasses.dataclass(frozen=True)
class UpdateComparison:
    """The result of comparing the state after a step with the recomputed state.

    Attributes:
      comparisons: One comparison for each array and each method.
      positions: Maps the path of each array that differs to the mesh positions of the devices on
        which it differs.
      num_arrays: Number of arrays that were compared with the result of `recomputed_update`.
      of_arrays: Number of arrays in the state.
      is_exact: Whether the bits of all arrays were compared as well.
    """

    comparisons: Sequence[Comparison]
    positions: Mapping[str, tuple[int, ...]]
    num_arrays: int
    of_arrays: int
    is_exact: bool

    @property
    def failed(self) -> list[Comparison]:
        """The failed comparisons."""
        return [x for x in self.comparisons if not x.is_equal]


class UpdateCheck:
    """Recomputes updates of a running job and compares them with the actual state.

    If a snapshot of the entire state does not fit in the memory limit, the arrays are split into
    parts, and one part is compared each time a step is certified.

    Args:
      partitioner: The job's partitioner.
      element_spec: Shapes and types of a batch.
      note: Function called with a message if something cannot be compared.
      max_bytes: Limit on the slots and moving averages in a snapshot, in bytes per device. The
        slots of the largest weight are included even if they exceed the limit. The default is the
        size of the weights, but at least LEAST_BYTES.

    Attributes:
      parts: Paths of the arrays in each part.
      is_exact: Whether the comparison is bitwise, which requires a snapshot of the entire state.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        element_spec: PyTree,
        note: Callable[[str], None],
        max_bytes: int | None = None,
    ):
        self._partitioner, self._layout = partitioner, partitioner.layout
        self._spec = element_spec
        self._leaves = {leaf.path: leaf for leaf in partitioner.layout.leaves()}
        self.parts = _split_into_parts(partitioner, self._leaves, max_bytes)
        self.is_exact = len(self.parts) == 1
        self._note = note
        self._programs: dict[int, Any] = {}
        self._digests = (
            StateDigests(partitioner.layout, partitioner.mesh) if self.is_exact else None
        )
        self._num_compared = 0
        self._snapshot: dict[str, jax.Array] | None = None
        self._snapshot_step: int | None = None
        self._is_known_deterministic = False
        self.lower()

    @property
    def _part(self) -> int:
        """The index of the part that is compared next."""
        return self._num_compared % len(self.parts)

    def lower(self) -> None:
        """Traces and lowers the comparison of the next part."""
        if self._part not in self._programs:
            self._programs[self._part] = self._lower_part(self.parts[self._part])

    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled comparison, which is compiled on the first call from any thread."""
        part = self._part
        if isinstance(self._programs[part], jax.stages.Lowered):
            self._programs[part] = self._programs[part].compile()
            if self._digests is not None:
                self._digests.compile()
        return self._programs[part]

    def check_memory(self) -> None:
        """Raises OutOfMemory if the comparison does not fit in the memory of the devices."""
        check_device_memory(
            self.compile(), self._partitioner.mesh.local_devices, "Recomputing an update"
        )

    def check_snapshot_memory(self) -> None:
        """Raises OutOfMemory if a snapshot does not fit in memory during a training step."""
        needed = sum(self._leaves[path].bytes_per_device for path in self._snapshot_paths())
        devices = self._partitioner.mesh.local_devices
        if devices[0].platform == "cpu":
            free = available_bytes() / len(devices)
        else:
            memory = [device.memory_stats() or {} for device in devices]
            free = min(
                x.get("bytes_limit", math.inf) - x.get("peak_bytes_in_use", 0) for x in memory
            )
        if needed > free:
            raise OutOfMemory(
                f"A copy of the state before a step needs {format_bytes(needed)} on each device, "
                f"but only {format_bytes(int(free))} are free."
            )

    def take_snapshot(self, state: TrainState, step: int) -> None:
        """Copies the arrays needed to recompute an update, before the next step donates them."""
        paths = self._snapshot_paths()
        self._snapshot_step = step
        self._snapshot = {path: x.copy() for path, x in leaves_with_path(state) if path in paths}

    def drop_snapshot(self) -> None:
        """Frees the memory of the snapshot."""
        self._snapshot = self._snapshot_step = None

    def has_snapshot_before(self, step: int) -> bool:
        """Returns whether there is a snapshot of the state from before a step."""
        return self._snapshot_step == step - 1

    def compare(
        self,
        state: TrainState,
        batch: GlobalBatch,
        key: jax.Array,
        measurements: Measurements,
        nudged: Measurements,
        salt: int,
        rounding: float,
    ) -> UpdateComparison:
        """Compares a state with the state recomputed from the snapshot, then frees the snapshot.

        Args:
          state: State after the step.
          batch: The step's complete batch.
          key: The run's random key.
          measurements: Measurements of the gradients for a few rows.
          nudged: The same measurements with perturbed weights.
          salt: Seed for the signs of the perturbations.
          rounding: Relative amount by which weights are perturbed to measure rounding errors.
        """
        paths = self.parts[self._part]
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "call take_snapshot() before the step"
        before = jax.tree.map_with_path(lambda p, x: snapshot.get(path_of(p), x), state)
        shares = np.array(_rounding_shares(measurements, nudged, self._trained_paths), np.float32)
        run = self.compile()

        def compare_recomputed(num_nudges: int) -> np.ndarray:
            scalars = shares, np.int32(num_nudges), np.float32(rounding), np.uint32(salt)
            scalars = jax.device_put(scalars, self._partitioner.replicated)
            return np.asarray(run(before, state, batch, key, *scalars))

        differences = compare_recomputed(0)
        if any_process(bool((differences[..., 0] > 1).any())):
            # The rounding errors were estimated from a few rows. Before reporting a difference,
            # measure them on the entire batch.
            differences = compare_recomputed(_NUDGES)
        # Report the device with the largest share of the tolerance for each array.
        comparisons, positions = [], {}
        for number, path in enumerate(paths):
            share, difference, tolerance = differences[np.argmax(differences[:, number, 0]), number]
            comparisons.append(
                Comparison(
                    UPDATE,
                    tolerances.kind_of(path),
                    path,
                    None,
                    float(difference),
                    float(tolerance),
                    _RECOMPUTED,
                )
            )
            if share > 1:
                positions[path] = tuple(np.flatnonzero(differences[:, number, 0] > 1).tolist())
        if self.is_exact and self._digests is not None:
            bit_comparisons, wrong = self._compare_bits(self._digests, before, state, batch, key)
            # Bit comparisons come first, because they identify the device.
            comparisons, positions = [*bit_comparisons, *comparisons], {**positions, **wrong}
        self._num_compared += 1
        return UpdateComparison(
            comparisons, positions, len(paths), len(self._leaves), is_exact=self.is_exact
        )

    def _compare_bits(
        self,
        digests_of: StateDigests,
        before: TrainState,
        state: TrainState,
        batch: GlobalBatch,
        key: jax.Array,
    ) -> tuple[list[Comparison], dict[str, tuple[int, ...]]]:
        """Compares bits with a second run of the job's compiled step, donating `before`."""
        run = self._partitioner.train_step.program
        expected, actual = digests_of(run(before, batch, key)[0]), digests_of(state)
        wrong = dict(expected.differences_from(actual))
        if wrong and not self._is_known_deterministic:
            # Check that the step is deterministic by running it twice from the same state.
            copies = (jax.tree.map(lambda x: x.copy(), state) for _ in range(2))
            first, second = (digests_of(run(copy, batch, key)[0]) for copy in copies)
            if list(first.differences_from(second)):
                self.is_exact = False
                self._note(
                    "The training step is not deterministic, so updates are only compared up to "
                    "rounding."
                )
                return [], {}
        self._is_known_deterministic = True
        return [
            Comparison(
                UPDATE, tolerances.kind_of(path), path, None, float(path in wrong), 0.0, _SAME_BITS
            )
            for path in self._leaves
        ], wrong

    @property
    def _trained_paths(self) -> list[str]:
        groups = self._partitioner.bound_learner.groups.by_name.values()
        return ["/".join(path) for group in groups for path in group.paths]

    def _snapshot_paths(self) -> set[str]:
        part = self.parts[self._part]
        # Gradients depend on all weights and on the loss scale, so these are always included.
        return {
            path
            for path in self._leaves
            if path in part or path.startswith(("mdl_vars/", "opt_states/loss_scale/"))
        }

    def _lower_part(self, paths: Sequence[str]) -> jax.stages.Lowered:
        partitioner, mesh = self._partitioner, self._partitioner.mesh
        replicated = partitioner.replicated
        state = self._layout.abstract(mesh)
        run = jax.jit(
            without_xla_errors(functools.partial(self._differences, paths), also=narrow_scans),
            in_shardings=(*(self._layout.shardings(mesh),) * 2, None, *(replicated,) * 5),
            out_shardings=replicated,
            compiler_options=partitioner.compiler_options,
        )
        scalars = (
            jax.eval_shape(lambda: jax.random.key(0)),
            jax.ShapeDtypeStruct((len(self._trained_paths),), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.uint32),
        )
        scalars = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), scalars
        )
        traced = run.trace(state, state, abstract_global_batch(self._spec, mesh), *scalars)
        return patch_matmuls(traced.lower(), mesh)

    def _differences(
        self,
        paths: Sequence[str],
        before: TrainState,
        state: TrainState,
        batch: GlobalBatch,
        key: jax.Array,
        shares: jax.Array,
        *rounding: jax.Array,
    ) -> jax.Array:
        """Recomputes arrays in a state and compares them with the actual arrays.

        Returns:
          Float32 [devices, arrays, 3] with the share of the tolerance, the difference and the
          tolerance for the element with the largest share in each device's block of each array.
        """
        partitioner, mesh = self._partitioner, self._partitioner.mesh
        share_by_path = {path: shares[i] for i, path in enumerate(self._trained_paths)}
        with partitioner.task_on_mesh.tracing():
            expected, allowed = recompute_state(
                partitioner,
                self._layout.unpad(before),
                partitioner.task_on_mesh.unpadded_inputs(batch),
                key,
                Rounding(share_by_path, *rounding),
                chosen=set(paths),
                actual_num_skipped=state.opt_states["num_skipped_steps"],
            )
        actual = dict(leaves_with_path(to_device(state)))
        specs = [self._leaves[path].spec for path in paths]

        def padded_leaves(tree: Mapping[str, jax.Array]) -> list[jax.Array]:
            leaves = [_as_numbers(tree[path]) for path in paths]
            return [
                pad_tree(x, spec, self._layout.axis_sizes) if x.ndim == len(spec) else x
                for x, spec in zip(leaves, specs, strict=True)
            ]

        # A random key's data has one more dim than the key.
        specs = [
            PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))
            for x, spec in zip(padded_leaves(expected), specs, strict=True)
        ]
        return jax.shard_map(
            lambda *blocks: jnp.stack(list(map(_worst_element, *blocks)))[None],
            mesh=mesh,
            in_specs=(specs,) * 3,
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )(padded_leaves(expected), padded_leaves(actual), padded_leaves(allowed))


def _worst_element(expected: jax.Array, actual: jax.Array, allowed: jax.Array) -> jax.Array:
    """Returns [share of tolerance, difference, tolerance] of the element with the largest share."""
    if not expected.size:
        return jnp.zeros(3, jnp.float32)
    is_same = (expected == actual) | ((expected != expected) & (actual != actual))
    if jnp.issubdtype(expected.dtype, jnp.floating):
        difference = jnp.abs(actual.astype(jnp.float32) - expected.astype(jnp.float32))
    else:
        larger, smaller = jnp.maximum(actual, expected), jnp.minimum(actual, expected)
        difference = (larger - smaller).astype(jnp.float32)
    difference = jnp.where(is_same, 0.0, jnp.where(jnp.isnan(difference), jnp.inf, difference))
    allowed = jnp.broadcast_to(allowed, difference.shape)
    share = jnp.where(difference == 0, 0.0, jnp.where(allowed > 0, difference / allowed, jnp.inf))
    share = jnp.where(jnp.isnan(share), jnp.where(difference < jnp.inf, 0.0, jnp.inf), share)
    index = jnp.argmax(share)
    return jnp.stack([x.reshape(-1)[index] for x in (share, difference, allowed)])


def _as_numbers(x: jax.Array) -> jax.Array:
    """Converts random keys to their data and booleans to integers, for arithmetic."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _rounding_shares(
    measurements: Measurements, nudged: Measurements, weights: Sequence[str]
) -> list[float]:
    """Returns the relative rounding error of each weight's gradient, from its projections."""
    shares = []
    for path in weights:
        norm, *projections = measurements.leaves[f"gradients/{path}"]
        change = nudged.leaves[f"gradients/{path}"][1:] - np.array(projections)
        # The expected square of a projection on random signs is the squared norm.
        error = float(np.sqrt(np.mean(np.square(change))))
        shares.append(error / float(norm) if norm > 0 else 0.0)
    median = float(np.median(shares)) if shares else 0.0
    # Projections may be unchanged by chance, so use at least the median.
    return [min(max(x, median), 1.0) if math.isfinite(x) else 1.0 for x in shares]


def _split_into_parts(
    partitioner: Partitioner, leaves: Mapping[str, LeafLayout], max_bytes: int | None
) -> list[list[str]]:
    """Splits the arrays of a state into parts that can each be copied within the memory limit.

    Each weight is in the same part as its slots. Counts, frozen weights and running means are in
    every part.
    """
    groups = partitioner.bound_learner.groups.by_name.values()
    # A weight and its slots form a unit, which is never split.
    unit_of_weight = {}
    for group in groups:
        for parts_of_path in group.paths:
            # An optimizer that uses all weights in its group updates them together.
            unit = parts_of_path if group.stack_ranks is None else group.paths[0]
            unit_of_weight["/".join(parts_of_path)] = "/".join(unit)
    units: dict[str, list[str]] = {}
    for path in leaves:
        weight = next((end for end in path_suffixes(path)[1:] if end in unit_of_weight), None)
        units.setdefault("" if weight is None else unit_of_weight[weight], []).append(path)
    in_every_part = units.pop("", [])

    def num_bytes(paths: Iterable[str], of_weights: bool = False) -> int:
        return sum(
            leaves[path].bytes_per_device
            for path in paths
            if path.startswith("mdl_vars/") == of_weights
        )

    if max_bytes is None:
        max_bytes = max(num_bytes(leaves, of_weights=True), LEAST_BYTES)
    # Fill the parts greedily, by the size of slots and averages.
    parts: list[list[str]] = [[]]
    for paths in units.values():
        if parts[-1] and num_bytes([*parts[-1], *paths]) > max_bytes:
            parts.append([])
        parts[-1] += paths
    return [[*in_every_part, *paths] for paths in parts]
