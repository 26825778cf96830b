"""Batches of a source's examples: images, arrays, anything with rows of equal shapes."""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.base import NumberedPipeline, described, spec_of_rows, zero_rows
from praxis_lite.inputs.batch_arrays import stacked
from praxis_lite.inputs.sources.base import Example, Part, Source, settings_alone
from praxis_lite.inputs.sources.cache import Made
from praxis_lite.inputs.sources.derived import code_of, derived, left_out
from praxis_lite.inputs.sources.faults import applied

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(eq=False)
class FromSource(NumberedPipeline):
    """Batches of a source's examples, each a dict of arrays or numbers of the same shapes.

    Any example is found by its number, so a job resumes at its batch at once, and each host reads
    its own rows alone. With `keep`, or a source that skips faults, all examples are read once, by
    all cores, and which are wanted is kept beside the files.

    `weights` of ones are added if there are none, a weight per label or else per row; numbers of
    64 bits become 32; a last batch that is not full ends in zero rows.

    Args:
      source: of the examples.
      transform: an importable function from an example to what stands in the batch: it decodes,
        scales, cuts, leaves out names. None: as the source has it.
      keep: an importable function that says of an example, before `transform`, if it is wanted.
      shuffle: True for endless batches in another order every epoch; False for one pass.
    """

    source: Source
    batch_size: int
    transform: Callable[[Example], Mapping[str, Any]] | None = None
    keep: Callable[[Example], bool] | None = None
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool

    def check(self) -> None:
        super().check()
        require(
            isinstance(self.source, Source), "FromSource.source", self.source,
            "a source of examples, such as NpyFiles('data/*.npz')",
        )
        self.source.check()
        if not self.num_examples:
            raise ConfigError(
                f"FromSource: of {len(self.source):,} examples none is left: {self.left_out}. "
                "Change keep, or mend the data."
            )
        _ = self._first

    @functools.cached_property
    def _wanted(self) -> tuple[np.ndarray | None, dict[str, int]]:
        """Numbers of the wanted examples (None: all), and counts of the others by reason."""
        if self.keep is None and not self.source.skip:
            return None, {}
        parts = derived(
            self.source, "kept", {"keep": code_of(self.keep), "transform": code_of(self.transform)},
            self._made, "filtering",
        )
        numbers = [part.part.start + part.arrays["rows"].astype(np.int64) for part in parts]
        return np.concatenate([np.empty(0, np.int64), *numbers]), left_out(self.source, parts)

    @property
    def left_out(self) -> dict[str, int]:
        """How many examples are not wanted: by fault, or "filtered" by `keep`."""
        return self._wanted[1]

    def _made(self, part: Part) -> Made:
        missing = collections.Counter()
        rows = [n - part.start for n, _ in self.source.made_of(part, self._why_not, missing)]
        return {"left_out": dict(missing)}, {"rows": np.array(rows, np.int32)}

    def _why_not(self, example: Example, number: int) -> str | None:
        """Returns "filtered" for an example that `keep` does not want, else None."""
        where = self.source.where(number)
        if self.keep is not None and not applied(self.keep, example, where):
            return "filtered"
        if self.source.skip:
            self._transformed(example, number)  # Its faults are found now.
        return None

    def _transformed(self, example: Example, number: int) -> Mapping[str, Any]:
        if self.transform is None:
            return example
        return applied(self.transform, example, self.source.where(number))

    @property
    def num_examples(self) -> int:
        """The examples that are wanted."""
        numbers, _ = self._wanted
        return len(self.source) if numbers is None else len(numbers)

    def where(self, number: int) -> str:
        numbers, _ = self._wanted
        return self.source.where(int(number if numbers is None else numbers[number]))

    def _example(self, place: int) -> Mapping[str, Any]:
        numbers, _ = self._wanted
        number = int(place if numbers is None else numbers[place])
        return self._transformed(self.source[number], number)

    @functools.cached_property
    def _first(self) -> dict[str, np.ndarray]:
        return stacked("FromSource", self.source.where(0), [self._example(0)], 1)

    def classes(self) -> dict[str, tuple[str, ...]]:
        result = self.source.classes_of_labels()
        # A transform may leave labels out, and calls them by another name at times.
        has_labels = self.transform is None or self._first.keys() & {"label", "labels", *result}
        return result if has_labels else {}

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self._first, self.batch_size)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        count = rows.stop - rows.start
        elements = [self._example(place) for place in self.numbers(index, rows).tolist()]
        if not elements:
            return zero_rows(self._first, count)
        return stacked("FromSource", type(self.source).__name__, elements, count)

    def fingerprint(self) -> dict[str, Any]:
        expected, missing = self._wanted
        digest = None if expected is None else hashlib.sha256(expected.tobytes()).hexdigest()
        return self.settings_fingerprint("batch_size", "seed", "shuffle", "source") | {
            "transform": json.loads(json.dumps(described(self.transform))),
            "left_out": missing, "kept_sha256": digest,
        }

    def __getstate__(self) -> dict[str, Any]:
        return settings_alone(self)
