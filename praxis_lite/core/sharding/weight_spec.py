"""A layer's declaration of a weight: its shape, its dtype and its split."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from praxis_lite.core.sharding.memory_spaces import DEVICE
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, to_partition_spec

__all__ = ("WeightSpec", "spec_items")


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A weight as the partitioner sees it.

    Attributes:
      shape: stacked dims first.
      dtype: of the stored weight.
      split_dims_mapping: split of the dims that the layer declared; None: replicated.
      stack_split_dims_mapping: an entry per stacked dim, outermost first. Its length is the number
        of leading dims that count layers.
      logical_axes: a name or None per dim of the whole shape, which rules turn into mesh axes; in
        place of the two mappings. None: the weight has no names.
      logical_axis_rules: (name, mesh axes) pairs of this weight alone, before the job's.
      slot_axes: as logical_axes, of its slots; mesh axes once decided. None: as the weight.
      declared_by: what decided the split, as the layout reports it.
      matrix: own dims that a product sums over, and that it gives to outputs; None: not known.
      num_dims_apart: of so many outermost stacked dims the model takes the layers as arrays of
        their own too (`LayersApart`).
      memory_kind: "pinned_host": the host's memory, of which the model takes it (`HostWeight`).
    """

    shape: tuple[int, ...]
    dtype: Any
    split_dims_mapping: SplitDims = None
    stack_split_dims_mapping: tuple[DimSplit, ...] = ()
    logical_axes: tuple[str | None, ...] | None = None
    logical_axis_rules: tuple[tuple[str, DimSplit], ...] = ()
    slot_axes: tuple[DimSplit, ...] | None = None
    declared_by: str = ""
    num_dims_apart: int = 0
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    memory_kind: str = DEVICE

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return self.shape[: len(self.stack_split_dims_mapping)]

    def partition_spec(self, axis_names: tuple[str, ...], path: str) -> PartitionSpec:
        """Returns the spec of the whole array, extended to its rank.

        Raises:
          ConfigError: the mapping does not fit the shape or the axes; names `path`.
        """
        own_rank = len(self.shape) - len(self.stack_split_dims_mapping)
        mapping = () if self.split_dims_mapping is None else self.split_dims_mapping
        # Checked by itself first: the message then shows what the layer's author wrote.
        to_partition_spec(mapping, axis_names, rank=own_rank, path=path)
        return to_partition_spec(
            (*self.stack_split_dims_mapping, *mapping), axis_names, rank=len(self.shape), path=path
        )


def spec_items(
    weight_specs: Any, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], WeightSpec]]:
    """Yields (path, spec) of every weight of a nested dict."""
    for name, child in weight_specs.items():
        if isinstance(child, WeightSpec):
            yield (*prefix, name), child
        else:
            yield from spec_items(child, (*prefix, name))


_declared = contextvars.ContextVar("declared weights")


def declared_weight(path: str) -> WeightSpec | None:
    """Returns the WeightSpec at a path under params while an optimizer runs; None: unknown."""
    return _declared.get({}).get(path)


def knows_weights(function: Callable, declared: Mapping[str, WeightSpec]) -> Callable:
    """Returns an optimizer's function that gets the specs by path from `declared_weight`."""

    @functools.wraps(function)
    def knowing(*args: Any, **kwargs: Any) -> Any:
        context = contextvars.copy_context()
        context.run(_declared.set, declared)
        return context.run(function, *args, **kwargs)

    return knowing
