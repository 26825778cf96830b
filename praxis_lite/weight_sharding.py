"""Which mesh axes each weight splits over, whatever way it was declared: one tree of specs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from praxis_lite.weights import WeightSpec

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSharding:
    """What a job says of weights whose layers declare no mesh axes."""


@dataclasses.dataclass(frozen=True)
class ShardingDecisions:
    """What was decided of every weight of a job on a mesh.

    Attributes:
      weight_specs: the model's tree, every split as mesh axes, `declared_by` filled in.
      notes: sentences: what was left whole, dropped, or is worth a look.
    """

    weight_specs: PyTree
    notes: tuple[str, ...] = ()


def decide_shardings(
    weight_specs: PyTree, declared: WeightSharding | None, axis_sizes: Mapping[str, int]
) -> ShardingDecisions:
    """Returns the splits of all weights over the axes of a mesh.

    Args:
      weight_specs: nested dict of WeightSpec, as the model declares them.
      declared: the job's rules; None: it has none.
      axis_sizes: devices along each mesh axis, in the mesh's order.

    Raises:
      ConfigError: names the weight.
    """

    def decided(spec: Any) -> Any:
        if isinstance(spec, WeightSpec):
            by = "split_dims_mapping" if spec.split_dims_mapping is not None else "nothing"
            return dataclasses.replace(spec, declared_by=by)
        return {name: decided(child) for name, child in spec.items()}

    return ShardingDecisions(decided(weight_specs))
