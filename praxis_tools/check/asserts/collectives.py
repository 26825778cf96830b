"""Assertions about the collectives of a compiled step: bytes, gathers and resharding."""

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
from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_lite.experiment.experiment import Experiment
from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_layers import GRADIENT_OF
from praxis_tools.plan.job_on_topology import planned_partitioner, step_specs
from praxis_tools.plan.topology import topology_of

_RESHARDS = ("all-to-all", "ragged-all-to-all", "collective-permute", "all-gather")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step, as `assert_collectives` reads it.

    Attributes:
      name: "train", "eval" or "decode".
      collectives: that a run of it executes, with their mesh axes.
      layout: of the state.
      compiled: None for a text.
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
    """Returns a step of an experiment, compiled; none of its data is read, and nothing is run.

    Args:
      experiment: an Experiment, its class, the config of its job; or a Partitioner of your own.
      step: "train", "eval" or "decode".
      batch: with a Partitioner: shapes and types of a global batch.
      mesh: devices along each axis, in place of the experiment's own.
      topology: as --topology of --mode=plan; the CPU's compiler makes other collectives than a
        TPU's (all-reduces of reduce-scatters).

    Raises:
      ConfigError: the experiment, its mesh or the topology is refused.
    """
    require_choice("The step of compiled_step", step, ("train", "eval", "decode"))
    if isinstance(experiment, Partitioner):
        if batch is None:
            raise TypeError("compiled_step of a Partitioner needs batch=, the shapes of a batch.")
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
        ((_, _, spec),) = step_specs(job, partitioner, [partitioner.steps[step]])
    compiled = mended(partitioner.steps[step].lower(spec), partitioner.mesh).compile()
    result = hlo.collectives(compiled, dict(partitioner.mesh.shape))
    return CompiledStep(step, result, partitioner.layout, compiled)


def assert_collectives(
    step: CompiledStep,
    *,
    max_bytes: int | None = None,
    max_bytes_over: Mapping[str, int] | None = None,
    no_gather_in_backward_of: Sequence[str] = (),
    no_gather_of_whole_weights: bool = False,
    max_resharding_bytes: int | None = None,
) -> None:
    """Checks a step's traffic; bytes are of results on a device, all executions together.

    Args:
      max_bytes: of all collectives.
      max_bytes_over: by mesh axis, of the collectives that run along it, alone or with others.
      no_gather_in_backward_of: paths of layers ("transformer/blocks/ff_layer"; a part of a path at
        its start counts) in whose backward pass nothing is gathered.
      no_gather_of_whole_weights: no all-gather has a weight of the model, or one layer's of a
        stack, as its result.
      max_resharding_bytes: of one execution of what is no gather of a weight and turns an array
        from one split to another: all-to-all, collective-permute, all-gather.

    Raises:
      AssertionError: names for each limit that is passed the layer, the source line, what was
        found and what was allowed.
    """
    result, message = step.collectives, []
    axes = dict(step.layout.axis_sizes)
    if max_bytes is not None:
        message += _over("all collectives", result, max_bytes)
    for axis, limit in (max_bytes_over or {}).items():
        require_choice("An axis of max_bytes_over", axis, axes)
        message += _over(f"collectives over {axis}", [c for c in result if axis in c.axes], limit)
    for layer in no_gather_in_backward_of:
        prefix = GRADIENT_OF + layer.strip("/")
        gathers = [
            item for item in result
            if item.kind == "all-gather" and any(_within(name, prefix) for name, _ in item.layers)
        ]
        message += [
            f"a gather in the backward pass of {layer}: {_line(gather)}" for gather in gathers
        ]
    weights = _weight_dims(step.layout)
    if no_gather_of_whole_weights:
        message += [
            f"a weight is gathered whole: {_line(element)}, as large as {weights[dims]}"
            for element in result if element.kind == "all-gather"
            for dims in _dims(element) if dims in weights
        ]
    if max_resharding_bytes is not None:
        message += [
            f"an array is resharded: {_line(item)}; allowed are {max_resharding_bytes:,} bytes"
            for item in result
            if item.kind in _RESHARDS and item.bytes > max_resharding_bytes
            and not any(dims in weights for dims in _dims(item))
        ]
    assert not message, f"The {step.name} step sends more than it may:\n  " + "\n  ".join(message)


def _over(what: str, result: Iterable[hlo.Collective], limit: int) -> list[str]:
    result = sorted(result, key=lambda item: -item.count * item.bytes)
    size = sum(element.count * element.bytes for element in result)
    if size <= limit:
        return []
    largest = "; ".join(map(_line, result[:3]))
    return [f"{what}: {size:,} bytes, allowed are {limit:,}. The largest: {largest}"]


def _line(item: hlo.Collective) -> str:
    where = f" ({item.source})" if item.source else ""
    return (
        f"{item.kind} over {'+'.join(item.axes) or '?'} of {item.layer}{where}, {item.count:,} x "
        f"{item.bytes:,} bytes"
    )


def _within(layer: str, prefix: str) -> bool:
    return layer == prefix or layer.startswith(prefix + "/")


def _dims(collective: hlo.Collective) -> list[tuple[int, ...]]:
    return [tuple(sorted(size for size in dims if size > 1)) for dims in collective.dims]


def _weight_dims(layout: StateLayout) -> dict[tuple[int, ...], str]:
    """Returns the sorted dims of the sharded weights: of the array, and of one layer of a stack."""
    result: dict[tuple[int, ...], str] = {}
    for leaf in layout.leaves():
        if not leaf.path.startswith("mdl_vars/params") or leaf.num_shards == 1:
            continue
        for shape in (leaf.shape, leaf.padded_shape):
            # A stack's first dim is that of its layers; a gather takes one at a time.
            for dims in (shape, shape[1:]):
                sorted_dims = tuple(sorted(size for size in dims if size > 1))
                if math.prod(sorted_dims) > 1:
                    result.setdefault(sorted_dims, leaf.path)
    return result
