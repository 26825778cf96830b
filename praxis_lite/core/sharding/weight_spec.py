"""A layer's declaration of a weight: its shape, its dtype and how it is sharded."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.logical_axes import MeshAxes
from praxis_lite.core.sharding.memory_spaces import DEVICE
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, to_partition_spec

__all__ = ("WeightSpec", "spec_items")


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The properties of a weight that the partitioner uses.

    Attributes:
      shape: Logical shape, including leading stacked dims.
      dtype: Dtype of the stored weight.
      split_dims_mapping: Mesh axes for the dims of a single layer. If None, these dims are not
        split.
      stack_split_dims_mapping: An entry per stacked dim, outermost first. Its length is the number
        of leading dims that stack layers.
      logical_axes: A name or None per dim of the complete shape. Rules resolve these names to mesh
        axes, which replace both mappings. If None, the weight has no names.
      logical_axis_rules: (name, mesh axes) pairs for this weight only, applied before the job's
        rules.
      slot_axes: Like `logical_axes`, but for the optimizer slots of the weight; contains mesh axes
        once the names are resolved. If None, slots are split like the weight.
      declared_by: Description of what determined the sharding, for the layout report.
      matrix: The dims of a single layer's weight that a matmul contracts, and the dims that become
        dims of the matmul's output. None if unknown.
      num_unstackable_dims: Number of leading stacked dims that the model also accepts unstacked, as
        `UnstackedLayers`.
      memory_kind: "pinned_host" for weights in host memory, which the model receives as
        `HostWeight`s.
    """

    shape: tuple[int, ...]
    dtype: Any
    split_dims_mapping: SplitDims = None
    stack_split_dims_mapping: tuple[DimSplit, ...] = ()
    logical_axes: tuple[MeshAxes, ...] | None = None
    logical_axis_rules: tuple[tuple[str, MeshAxes], ...] = ()
    slot_axes: tuple[MeshAxes, ...] | None = None
    declared_by: str = ""
    num_unstackable_dims: int = 0
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    memory_kind: str = DEVICE

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return self.shape[: len(self.stack_split_dims_mapping)]

    def partition_spec(self, axis_names: tuple[str, ...], path: str) -> PartitionSpec:
        """Returns the spec of the complete array, extended to its rank.

        Raises:
          ConfigError: The mapping does not fit the shape or the axes. The message names `path`.
        """
        own_rank = len(self.shape) - len(self.stack_split_dims_mapping)
        mapping = () if self.split_dims_mapping is None else self.split_dims_mapping
        # Check this mapping first, so that error messages show it as the author wrote it.
        to_partition_spec(mapping, axis_names, rank=own_rank, path=path)
        return to_partition_spec(
            (*self.stack_split_dims_mapping, *mapping), axis_names, rank=len(self.shape), path=path
        )


def spec_items(
    weight_specs: Any, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], WeightSpec]]:
    """Yields (path, spec) for every weight in a nested dict."""
    for name, child in weight_specs.items():
        if isinstance(child, WeightSpec):
            yield (*prefix, name), child
        else:
            yield from spec_items(child, (*prefix, name))


_declared: contextvars.ContextVar[Mapping[str, WeightSpec]] = contextvars.ContextVar(
    "declared weights"
)


def declared_weight(path: str) -> WeightSpec | None:
    """Returns the WeightSpec at a path under params while an optimizer runs, or None."""
    return _declared.get({}).get(path)


def with_declared_weights(
    function: Callable[..., Any], declared: Mapping[str, WeightSpec]
) -> Callable[..., Any]:
    """Wraps an optimizer's function so that `declared_weight` looks up specs in `declared`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        context = contextvars.copy_context()
        context.run(_declared.set, declared)
        return context.run(function, *args, **kwargs)

    return wrapped
