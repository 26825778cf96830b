"""Assertions that limit the collectives of a compiled step."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax

from praxis_lite.config.build import build
from praxis_lite.config.overrides import check_required
from praxis_lite.core.errors import require_choice
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_lite.experiment.experiment import Experiment
from praxis_lite.trainer.compilation import current_metadata
from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_layers import GRADIENT_OF
from praxis_tools.plan.job_on_topology import planned_partitioner, step_specs
from praxis_tools.plan.topology import topology_of

_RESHARDS = ("all-to-all", "ragged-all-to-all", "collective-permute", "all-gather")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step and its collectives, for `assert_collectives`.

    Attributes:
      name: "train", "eval" or "decode".
      collectives: The collectives that one step executes, with their mesh axes.
      layout: Layout of the train state.
      compiled: The executable, or None if the collectives were parsed from HLO text.
    """

    name: str
    collectives: list[hlo.Collective]
    layout: StateLayout
    compiled: jax.stages.Compiled | None = None


def compiled_step(
    experiment: "Experiment | type[Experiment] | fdl.Config[Any] | Partitioner",
    step: str = "train",
    *,
    batch: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    mesh: Sequence[int] | None = None,
    topology: str = "cpu:8",
) -> CompiledStep:
    """Compiles a step of an experiment without reading data or running the step.

    Args:
      experiment: An Experiment, an Experiment class, the config of a job, or a Partitioner.
      step: "train", "eval" or "decode".
      batch: Shapes and types of a global batch; required with a Partitioner.
      mesh: Number of devices along each axis, or None for the experiment's own mesh.
      topology: Devices to compile for, as in --topology with `praxis plan`. The compilers for CPUs
        and TPUs choose different collectives, such as all-reduces instead of reduce-scatters.

    Returns:
      The compiled step.

    Raises:
      ConfigError: The experiment, its mesh or the topology is invalid.
    """
    require_choice("The step of compiled_step", step, ("train", "eval", "decode"))
    if isinstance(experiment, Partitioner):
        if batch is None:
            raise TypeError(
                "compiled_step requires `batch`, the shapes and dtypes of a global batch, if it is "
                "given a Partitioner."
            )
        partitioner, spec = experiment, dict(batch)
    else:
        if isinstance(experiment, type):
            experiment = experiment()
        config = experiment.config() if isinstance(experiment, Experiment) else experiment
        check_required(config)
        job = build(config)
        shape = {} if mesh is None else {"ici_mesh_shape": tuple(mesh), "dcn_mesh_shape": None}
        mesh_config = dataclasses.replace(job.mesh, **shape, allow_unused_devices=True)
        job = dataclasses.replace(job, mesh=mesh_config)
        partitioner = planned_partitioner(job, topology_of(topology))
        (_, _, spec), *_ = step_specs(job, partitioner, [partitioner.steps[step]])
    with current_metadata():
        compiled = patch_matmuls(partitioner.steps[step].lower(spec), partitioner.mesh).compile()
    collectives = hlo.collectives(compiled, dict(partitioner.mesh.shape))
    return CompiledStep(step, collectives, partitioner.layout, compiled)


def assert_collectives(
    step: CompiledStep,
    *,
    max_bytes: int | None = None,
    max_bytes_over: Mapping[str, int] | None = None,
    no_gather_in_backward_of: Sequence[str] = (),
    no_gather_of_full_weights: bool = False,
    max_resharding_bytes: int | None = None,
) -> None:
    """Asserts that the collectives of a step stay within limits.

    The size of a collective is the size of its results on one device, in bytes. Sizes are summed
    over all executions in a step.

    Args:
      step: The compiled step.
      max_bytes: Limit for the total size of all collectives.
      max_bytes_over: Maps a mesh axis to the limit for the total size of all collectives along this
        axis, including collectives that run along several axes.
      no_gather_in_backward_of: Paths of layers whose backward pass must not contain all-gathers,
        such as "transformer/blocks/ff_layer". A path includes all layers inside that layer.
      no_gather_of_full_weights: Whether to forbid all-gathers of an entire weight or of an entire
        layer in a stacked weight.
      max_resharding_bytes: Limit for each execution of a collective that reshards an array other
        than a weight (all-to-all, collective-permute or all-gather).

    Raises:
      AssertionError: A limit is exceeded. The message contains the layer, the source line, the
        actual size and the limit.
    """
    collectives, failures = step.collectives, []
    axes = dict(step.layout.axis_sizes)
    if max_bytes is not None:
        failures += _check_total("all collectives", collectives, max_bytes)
    for axis, limit in (max_bytes_over or {}).items():
        require_choice("An axis of max_bytes_over", axis, axes)
        along_axis = [x for x in collectives if axis in x.axes]
        failures += _check_total(f"collectives over {axis}", along_axis, limit)
    for layer in no_gather_in_backward_of:
        prefix = GRADIENT_OF + layer.strip("/")
        failures += [
            f"all-gather in the backward pass of {layer}: {_line(x)}"
            for x in collectives
            if x.kind == "all-gather" and any(_is_within(name, prefix) for name, _ in x.layers)
        ]
    weights = _weight_dims(step.layout)
    if no_gather_of_full_weights:
        failures += [
            f"all-gather of an entire weight: {_line(x)}, which is the size of {weights[dims]}"
            for x in collectives
            if x.kind == "all-gather"
            for dims in _dims(x)
            if dims in weights
        ]
    if max_resharding_bytes is not None:
        failures += [
            f"an array is resharded: {_line(x)}; the limit is {max_resharding_bytes:,} bytes"
            for x in collectives
            if x.kind in _RESHARDS
            and x.bytes > max_resharding_bytes
            and not any(dims in weights for dims in _dims(x))
        ]
    assert not failures, f"The {step.name} step exceeds its limits:\n  " + "\n  ".join(failures)


def _check_total(description: str, collectives: Iterable[hlo.Collective], limit: int) -> list[str]:
    collectives = sorted(collectives, key=lambda x: -x.count * x.bytes)
    size = sum(x.count * x.bytes for x in collectives)
    if size <= limit:
        return []
    largest = "; ".join(map(_line, collectives[:3]))
    return [f"{description}: {size:,} bytes, but the limit is {limit:,}. Largest: {largest}"]


def _line(collective: hlo.Collective) -> str:
    source = f" ({collective.source})" if collective.source else ""
    return (
        f"{collective.kind} over {'+'.join(collective.axes) or '?'} of {collective.layer}{source}, "
        f"{collective.count:,} x {collective.bytes:,} bytes"
    )


def _is_within(layer: str, prefix: str) -> bool:
    return layer == prefix or layer.startswith(prefix + "/")


def _dims(collective: hlo.Collective) -> list[tuple[int, ...]]:
    """Returns the sorted dims of each result, excluding dims of size 1."""
    return [tuple(sorted(size for size in dims if size > 1)) for dims in collective.dims]


def _weight_dims(layout: StateLayout) -> dict[tuple[int, ...], str]:
    """Returns a dict that maps the sorted dims of each sharded weight to its path.

    Stacked weights have a second entry without the stack dim.
    """
    paths: dict[tuple[int, ...], str] = {}
    for leaf in layout.leaves():
        if not leaf.path.startswith("mdl_vars/params") or leaf.num_shards == 1:
            continue
        for shape in (leaf.shape, leaf.padded_shape):
            # The first dim of a stacked weight is the layers dim. Layers are usually gathered one
            # at a time.
            for dims in (shape, shape[1:]):
                sorted_dims = tuple(sorted(size for size in dims if size > 1))
                if math.prod(sorted_dims) > 1:
                    paths.setdefault(sorted_dims, leaf.path)
    return paths
