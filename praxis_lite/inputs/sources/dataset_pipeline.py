"""Base class of pipelines over a dataset that a user-defined function returns."""

import abc
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.base import InputPipeline, batches_sha256, fingerprint_json, spec_of_rows
from praxis_lite.inputs.batch_arrays import stack_examples

if TYPE_CHECKING:
    import jax

_NUM_HASHED_BATCHES = 2  # The fingerprint contains a hash of this many batches.


class DatasetPipeline(InputPipeline):
    """Base class of pipelines over a dataset that a user-defined function returns."""

    make_dataset: Callable[[], Any]
    batch_size: int

    @property
    @abc.abstractmethod
    def first_batch(self) -> dict[str, np.ndarray]:
        """A batch with only the first example."""

    def check(self) -> None:
        super().check()
        self.element_spec()

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self.first_batch, self.batch_size)

    def first_of(self, examples: Iterator[Any]) -> Any:
        """Returns the first example. Raises ConfigError if there is none."""
        for example in examples:
            return example
        raise ConfigError(
            f"{type(self).__name__}: {self.name} has 0 elements; expected at least one. Add data, "
            "or relax its filters."
        )

    def stacked(self, examples: list[Any], num_rows: int) -> dict[str, np.ndarray]:
        """Stacks examples into a batch with `num_rows` rows."""
        return stack_examples(
            type(self).__name__, lambda n: f"an element of {self.name}", examples, num_rows
        )

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint("batch_size", "num_batches") | {
            "make_dataset": fingerprint_json(self.make_dataset),
            "first_batches_sha256": self._digest,
        }

    @functools.cached_property
    def _digest(self) -> str:
        return batches_sha256(itertools.islice(self.batches(), _NUM_HASHED_BATCHES))

    @property
    def name(self) -> str:
        """The name of the user-defined function."""
        return function_name(self.make_dataset)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process builds the dataset again.
        recomputed = ("dataset", "first_batch")
        return {name: value for name, value in vars(self).items() if name not in recomputed}
