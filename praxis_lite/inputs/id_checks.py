"""Ids and labels that a model has no row for, found on the host before a step sees them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.errors import ConfigError


def check_ids(
    inputs: Mapping[str, Any], sizes: Mapping[str, int], where: str, *, first_row: int = 0
) -> None:
    """Checks that the integers of a batch are ids that its model has.

    An id that is too large is refused wherever it stands, for an embedding makes NaN of it, which
    spreads. Labels, and negative ids, count only where `weights` are above 0: such a label
    changes nothing, and a negative id is a padding's.

    Args:
      inputs: the rows that this process has of a batch, as NumPy arrays.
      sizes: how many ids there are, by the leaf's name (`Task.num_ids`).
      where: the dataset and the batch, for the message.
      first_row: which row of the whole batch the first one here is.

    Raises:
      ConfigError: names the dataset, the row and the value.
    """
    for name, size in sizes.items():
        x = np.asarray(inputs.get(name, ()))
        # Two passes over a few integers: what follows is for what one of them has found.
        if x.dtype.kind not in "iu" or not x.size or (x.min() >= 0 and x.max() < size):
            continue
        weighs = _weighs(x, inputs.get("weights")) if name in ("ids", "labels") else False
        is_wrong = (x < 0) & weighs | (x >= size) & (weighs if name == "labels" else True)
        for place in np.argwhere(is_wrong)[:1]:
            raise ConfigError(
                f"{where}: row {first_row + place[0]} of {name} has {x[tuple(place)]}; wanted are "
                f"ids from 0 to {size - 1}, for the model's vocab_size is {size} (num_classes of a "
                "classifier). Enlarge it, or mend the data: pad with 0, and give what is to count "
                "for nothing a weight of 0."
            )


def _weighs(x: np.ndarray, weights: Any) -> Any:
    """Returns where the ids `x` have a weight above 0, to be broadcast to their shape."""
    if weights is None:
        return True
    is_counted = np.asarray(weights) > 0
    if is_counted.shape == x.shape:
        return is_counted
    if is_counted.shape == x.shape[:1]:
        return is_counted.reshape(-1, *(1,) * (x.ndim - 1))
    return True
