"""A pipeline that batches a source's examples, such as images or arrays of the same shape."""

import bisect
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
from praxis_lite.inputs.mixing.shuffle import WindowedOrder
from praxis_lite.inputs.sources.base import Example, Part, Source, picklable_state
from praxis_lite.inputs.sources.bounded_files import BoundedFiles
from praxis_lite.inputs.sources.cache import Contents
from praxis_lite.inputs.sources.derived import derive_parts, function_recipe, num_left_out
from praxis_lite.inputs.sources.faults import apply_to_example
from praxis_lite.inputs.sources.in_place_files import OpenedFiles

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
      shuffle_window: Number of consecutive examples that are shuffled together, or None to shuffle
        all examples together. If the files contain rows, the order of the files also changes in
        each epoch. Only the files of one or two windows are then needed at the same time.
    """

    source: Source
    batch_size: int
    transform: Callable[[Example], Mapping[str, Any]] | None = None
    keep: Callable[[Example], bool] | None = None
    seed: int = 0
    _: dataclasses.KW_ONLY
    shuffle: bool
    shuffle_window: int | None = None

    def check(self) -> None:
        super().check()
        if self.shuffle_window is not None:
            self.require_at_least(self.batch_size, "shuffle_window")
            require(
                self.shuffle, "FromSource.shuffle", False, "True, because shuffle_window is set"
            )
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
        self._check_cache()
        _ = self._first_row

    def _check_cache(self) -> None:
        """Raises ConfigError if the files of two windows (or batches) exceed `cache_bytes`."""
        if (files := self._bounded_files) is None:
            return
        setting, unit, size = "batch_size", "batches", self.batch_size
        if self.shuffle:
            size = self.shuffle_window or self.num_examples
            setting, unit = "shuffle_window", "windows"

        def needed(num_rows: int) -> int:
            return files.max_bytes_of_rows(self._first_of_files, 2 * num_rows)

        if needed(size) > files.cache_bytes:
            largest = bisect.bisect_right(range(size), files.cache_bytes, key=needed) - 1
            fix = f"Set {setting} to at most {largest:,}" if largest > 0 else "Write smaller files"
            raise ConfigError(
                f"FromSource: the files of two {unit} of {size:,} examples have up to "
                f"{needed(size):,} bytes, but cache_bytes is {files.cache_bytes:,}. {fix}, or "
                "increase cache_bytes."
            )

    @property
    def _bounded_files(self) -> BoundedFiles | None:
        """The source's files if its `cache_bytes` is set, or None."""
        return self.source.bounded if isinstance(self.source, OpenedFiles) else None

    @functools.cached_property
    def _first_of_files(self) -> np.ndarray:
        """int64[files + 1]: the number of selected examples before each file, then their total."""
        indices, _ = self._selection
        files = self.source.first_of_files()
        return files if indices is None else np.searchsorted(indices, files)

    @functools.cached_property
    def _order(self) -> WindowedOrder | None:
        if self.shuffle_window is None:
            return None
        return WindowedOrder(self.seed, self._first_of_files, self.shuffle_window)

    def example_indices(self, index: int, rows: slice) -> np.ndarray:
        if self._order is None:
            return super().example_indices(index, rows)
        return self._order.examples(index * self.batch_size + rows.start, rows.stop - rows.start)

    _prefetched_windows = range(0)

    def _prefetch(self, index: int, rows: slice) -> None:
        """Prefetches the files of this and the next window (or batch, if there are no windows)."""
        files = self._bounded_files
        if files is None or (self.shuffle and self._order is None):
            return
        if self._order is None:
            now, later = (self.example_indices(k, rows) for k in (index, index + 1))
        else:
            first, stop = (index * self.batch_size + row for row in (rows.start, rows.stop))
            windows = range(self._order.window_of(first), self._order.window_of(stop - 1) + 1)
            if windows == self._prefetched_windows:
                return
            self._prefetched_windows = windows
            now = np.concatenate([self._order.examples_of_window(number) for number in windows])
            later = self._order.examples_of_window(windows.stop)
        examples = [self._source_indices(now), self._source_indices(later)]
        files.prefetch(self.source.first_of_files(), examples)

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
        if (files := self._bounded_files) is not None:
            files.prefetch(self.source.first_of_files(), [])  # Close the files.
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

    def _source_indices(self, examples: np.ndarray) -> np.ndarray:
        indices, _ = self._selection
        return examples if indices is None else indices[examples]

    def where(self, example: int) -> str:
        return self.source.where(int(self._source_indices(np.array(example))))

    def _example(self, example: int) -> Mapping[str, Any]:
        index = int(self._source_indices(np.array(example)))
        return self._transform_example(self.source[index], index)

    @functools.cached_property
    def _first_row(self) -> dict[str, np.ndarray]:
        return stack_examples("FromSource", self.where, [self._example(0)], 1)

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
        self._prefetch(index, rows)
        indices = self.example_indices(index, rows).tolist()
        if not indices:
            return zero_rows(self._first_row, num_rows)
        examples = [self._example(i) for i in indices]
        return stack_examples("FromSource", lambda n: self.where(indices[n]), examples, num_rows)

    def fingerprint(self) -> dict[str, Any]:
        indices, num_left_out_by_reason = self._selection
        digest = None if indices is None else hashlib.sha256(indices.tobytes()).hexdigest()
        return self.settings_fingerprint("batch_size", "seed", "shuffle", "source") | {
            "transform": json.loads(json.dumps(fingerprint_json(self.transform))),
            "left_out": num_left_out_by_reason,
            "kept_sha256": digest,
            **({"shuffle_window": self.shuffle_window} if self.shuffle_window else {}),
        }

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self)
