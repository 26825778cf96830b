"""Batches that a caller in Python gives, as a pipeline."""

from collections.abc import Iterable, Mapping

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.numpy_data import InMemory

Batch = Mapping[str, np.ndarray]


def in_memory(data: Batch | Iterable[Batch]) -> InMemory:
    """Returns a pipeline of the rows of all batches, as many at a time as the largest has.

    Raises:
      ConfigError: there are no batches, or they do not fit together.
    """
    batches = [data] if isinstance(data, Mapping) else list(data)
    for batch in batches:
        if not isinstance(batch, Mapping) or batch.keys() != batches[0].keys():
            result = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(
                f"evaluate was given a batch of {result}; give NumPy arrays by name, the same "
                "names in every batch."
            )
    if not batches:
        raise ConfigError("evaluate was given 0 batches. Give it one at least.")
    arrays = {name: [np.asarray(batch[name]) for batch in batches] for name in batches[0]}
    most_rows = max((len(x) for xs in arrays.values() for x in xs if x.ndim), default=1)
    try:
        joined = {name: np.concatenate(xs) if xs[0].ndim else xs[0] for name, xs in arrays.items()}
    except ValueError as error:
        raise ConfigError(f"evaluate was given batches that do not fit: {error}.") from None
    return InMemory(joined, batch_size=max(most_rows, 1), shuffle=False)
