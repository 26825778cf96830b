"""A pipeline that batches a source's examples, such as images or arrays of the same shape."""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.inputs.base import ExamplePipeline, fingerprint_json, spec_of_rows, zero_rows
from praxis_lite.inputs.batch_arrays import stack_examples
from praxis_lite.inputs.sources.base import Example, Part, Source, picklable_state
from praxis_lite.inputs.sources.cache import Contents
from praxis_lite.inputs.sources.derived import derive_parts, function_recipe, num_left_out
from praxis_lite.inputs.sources.faults import apply_to_example

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(eq=False)
class FromSource(ExamplePipeline):
    """Batches of examples from a source: dicts of numbers, or of arrays with the same shapes.

    Sources have random access, so a job resumes without replaying data, and each host reads only
    its own rows. If `keep` or the source's `skip` is set, all examples are read once on all cores
    to select the examples to use, and the selection is cached in the source's cache folder.

    If there are no `weights`, weights of 1 are added, with the shape of `labels`, or one per row if
    there are no `labels`. 64-bit numbers are converted to 32 bits. An incomplete last batch is
    padded with zero rows.

    Args:
      source: Source of the examples.
      batch_size: Number of rows in the global batch.
      transform: Importable function from an example to the leaves of its row, for example to
        decode, scale, crop or drop values. If None, examples are used unchanged.
      keep: Importable predicate that is called before `transform`. Examples for which it returns
        False are skipped. If None, all examples are used.
      seed: Seed of the shuffled order.
      shuffle: True for endless batches, reshuffled every epoch; False for one pass in order.
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
            isinstance(self.source, Source),
            "FromSource.source",
            self.source,
            "a source of examples, such as NpyFiles('data/*.npz')",
        )
        self.source.check()
        if not self.num_examples:
            raise ConfigError(
                f"FromSource: all {len(self.source):,} examples were skipped: {self.left_out}. "
                "Relax `keep`, or fix the data."
            )
        _ = self._first_row

    @functools.cached_property
    def _selection(self) -> tuple[np.ndarray | None, dict[str, int]]:
        """The source indices of examples to use (None for all), and counts of skipped examples."""
        if self.keep is None and not self.source.skip:
            return None, {}
        parts = derive_parts(
            self.source,
            "kept",
            {"keep": function_recipe(self.keep), "transform": function_recipe(self.transform)},
            self._select,
            "filtering",
        )
        indices = [part.part.start + part.arrays["rows"].astype(np.int64) for part in parts]
        return np.concatenate([np.empty(0, np.int64), *indices]), num_left_out(self.source, parts)

    @property
    def left_out(self) -> dict[str, int]:
        """The number of skipped examples for each reason: a fault, or "filtered" for `keep`."""
        return self._selection[1]

    def _select(self, part: Part) -> Contents:
        counts: collections.Counter[str] = collections.Counter()
        reasons = self.source.map_part(part, self._reason_to_leave_out, counts)
        rows = [index - part.start for index, _ in reasons]
        return {"left_out": dict(counts)}, {"rows": np.array(rows, np.int32)}

    def _reason_to_leave_out(self, example: Example, index: int) -> str | None:
        """Returns "filtered" if `keep` returns False, else None; raises BadExample for a fault."""
        where = self.source.where(index)
        if self.keep is not None and not apply_to_example(self.keep, example, where):
            return "filtered"
        if self.source.skip:
            self._transform_example(example, index)  # Raises BadExample if the example has a fault.
        return None

    def _transform_example(self, example: Example, index: int) -> Mapping[str, Any]:
        if self.transform is None:
            return example
        return apply_to_example(self.transform, example, self.source.where(index))

    @property
    def num_examples(self) -> int:
        """The number of examples that are not skipped."""
        indices, _ = self._selection
        return len(self.source) if indices is None else len(indices)

    def _source_index(self, example: int) -> int:
        indices, _ = self._selection
        return int(example if indices is None else indices[example])

    def where(self, example: int) -> str:
        return self.source.where(self._source_index(example))

    def _example(self, example: int) -> Mapping[str, Any]:
        index = self._source_index(example)
        return self._transform_example(self.source[index], index)

    @functools.cached_property
    def _first_row(self) -> dict[str, np.ndarray]:
        return stack_examples("FromSource", self.source.where(0), [self._example(0)], 1)

    def classes(self) -> dict[str, tuple[str, ...]]:
        classes = self.source.classes_of_labels()
        # A transform may drop the labels, or rename them to one of the usual names.
        labels = {"label", "labels", *classes}
        has_labels = self.transform is None or self._first_row.keys() & labels
        return classes if has_labels else {}

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        return spec_of_rows(self._first_row, self.batch_size)

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        num_rows = rows.stop - rows.start
        examples = [self._example(i) for i in self.example_indices(index, rows).tolist()]
        if not examples:
            return zero_rows(self._first_row, num_rows)
        return stack_examples("FromSource", type(self.source).__name__, examples, num_rows)

    def fingerprint(self) -> dict[str, Any]:
        indices, num_left_out_by_reason = self._selection
        digest = None if indices is None else hashlib.sha256(indices.tobytes()).hexdigest()
        return self.settings_fingerprint("batch_size", "seed", "shuffle", "source") | {
            "transform": json.loads(json.dumps(fingerprint_json(self.transform))),
            "left_out": num_left_out_by_reason,
            "kept_sha256": digest,
        }

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self)
