"""Means over batches of unequal weight: every metric is a (value, weight) pair."""

import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import require

# Value and weight are scalars: Python numbers, NumPy or JAX arrays of shape ().
WeightedScalars = Mapping[str, tuple[Any, Any]]


class WeightedMean:
    """Mean of each metric over all that was added: sum(value * weight) / sum(weight), in float64.

    A pair of weight 0 is left out: a batch of padding rows may report NaN, and 0 * NaN would spoil
    the whole mean. A NaN that has weight stays.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, scalars: WeightedScalars) -> None:
        """Adds a batch's metrics; raises ConfigError if a weight is negative or not finite."""
        for name, (value, weight) in scalars.items():
            weight = float(weight)
            require(
                math.isfinite(weight) and weight >= 0, f"The weight of metric {name!r}", weight,
                "a finite number from 0 on",
            )
            if weight > 0:
                self._sums[name] = self._sums.get(name, 0.0) + float(value) * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, float]:
        """Returns the means; a metric of total weight 0 has none and is left out, never NaN."""
        return {name: total / self._weights[name] for name, total in self._sums.items()}
