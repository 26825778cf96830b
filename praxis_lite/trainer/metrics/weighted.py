"""Means over batches of unequal weight, from metrics that are (value, weight) pairs."""

import math
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import require

# Value and weight are scalars: Python numbers, NumPy or JAX arrays of shape ().
WeightedScalars = Mapping[str, tuple[Any, Any]]


class WeightedMean:
    """Accumulates the mean of each metric, sum(value * weight) / sum(weight), in float64.

    Pairs with weight 0 are ignored, because a batch of padding rows may report NaN, and 0 * NaN is
    NaN. A NaN with a positive weight makes the mean NaN.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, scalars: WeightedScalars) -> None:
        """Adds a batch's metrics; raises ConfigError if a weight is negative or not finite."""
        for name, (value, weight) in scalars.items():
            weight = float(weight)
            require(
                math.isfinite(weight) and weight >= 0,
                f"The weight of metric {name!r}",
                weight,
                "a finite non-negative number",
            )
            if weight > 0:
                self._sums[name] = self._sums.get(name, 0.0) + float(value) * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, float]:
        """Returns the mean of each metric whose total weight is not 0."""
        return {name: total / self._weights[name] for name, total in self._sums.items()}
