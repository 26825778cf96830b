"""Mixes the rows of several pipelines in proportion to given weights."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from praxis_lite.core.errors import ConfigError, did_you_mean, require, require_choice
from praxis_lite.inputs.base import IndexedPipeline, spec_of_rows, zero_rows
from praxis_lite.inputs.mixing.same_classes import require_same_classes
from praxis_lite.inputs.mixing.schedule import MAX_PERIOD, Schedule, exact_parts, rounded_parts

if TYPE_CHECKING:
    import jax

Weights = Mapping[str, float]
_NUM_SAMPLED_ROWS = 1024  # Number of rows per source whose tokens are counted if unit="tokens".


@dataclasses.dataclass(eq=False)
class Mixture(IndexedPipeline):
    """A single stream of rows from several pipelines, in proportion to their weights.

    Each source contributes its rows in order. After any number of rows, the number of rows from
    each source is within one row of the source's share. Fractions of a row carry over when the
    weights change, so a source whose weight becomes 0 may contribute one more row. The source of a
    row is computed from the row's position and all weights, including later ones; therefore any
    batch can be computed without the batches before it.

    A finite source repeats. An endless source (`shuffle=True`) is reshuffled every epoch.

    Args:
        sources: Pipelines keyed by name. They must have the same leaves and row lengths. Their
            batch sizes have no effect.
        weights: Weight of each source, in any unit, such as {"code": 0.7, "text": 0.3}. Decimals
            are exact: 0.7 means 7/10. A list [(0, {...}), (1000, {...})] changes the weights at the
            given batches.
        batch_size: Number of rows in the global batch.
        stop: "never", or "first" to end when the first finite source runs out of rows.
        unit: Whether weights are shares of "examples" (rows) or of "tokens" (labels with nonzero
            weight). The number of tokens per row is the source's `tokens_per_row()` or, if that is
            None, the mean over the source's first 1,024 rows.
    """

    sources: Mapping[str, IndexedPipeline]
    weights: Weights | Sequence[tuple[int, Weights]]
    batch_size: int
    _: dataclasses.KW_ONLY
    stop: Literal["never", "first"] = "never"
    unit: Literal["examples", "tokens"] = "examples"

    def check(self) -> None:
        super().check()
        require_choice("Mixture.stop", self.stop, ("never", "first"))
        require_choice("Mixture.unit", self.unit, ("examples", "tokens"))
        require(
            isinstance(self.sources, Mapping) and len(self.sources) > 0,
            "Mixture.sources",
            self.sources,
            "a dict of one or more pipelines, keyed by name",
        )
        for name, source in self.sources.items():
            if not isinstance(source, IndexedPipeline):
                raise ConfigError(
                    f"Mixture: the source {name!r} is a {type(source).__name__}, which has no "
                    "random access; expected an IndexedPipeline."
                )
            source.check()
            if len(source.element_specs()) > 1:
                raise ConfigError(
                    f"Mixture: the batches of the source {name!r} have several shapes, because it "
                    "sets bucket_lengths; expected rows of one length. Set bucket_lengths=() in "
                    "all sources; packing=True also avoids padding."
                )
        for name, length in self._lengths.items():
            if length == 0:
                raise ConfigError(f"Mixture: the source {name!r} is empty. Remove it, or add data.")
        self._check_leaves()
        # This checks the weights.
        _ = self._phases
        if self.stop == "first" and self._end is None:
            raise ConfigError(
                "Mixture.stop is 'first', but all sources with nonzero weight are endless: "
                f"{sorted(self.sources)}. Set shuffle=False in one of them, or stop='never'."
            )

    def classes(self) -> dict[str, tuple[str, ...]]:
        return {k: v for source in self.sources.values() for k, v in source.classes().items()}

    def _check_leaves(self) -> None:
        require_same_classes({f"Mixture.sources.{k}": v for k, v in self.sources.items()})
        rows = {
            name: {
                leaf: (*spec.shape[1:], str(np.dtype(spec.dtype)))
                for leaf, spec in source.element_spec().items()
            }
            for name, source in self.sources.items()
        }
        first = next(iter(rows))
        for name, row in rows.items():
            if row != rows[first]:
                raise ConfigError(
                    f"Mixture: rows of {name!r} have the leaves {row}, but rows of {first!r} have "
                    f"{rows[first]}. All sources must have the same leaves and the same seq_len."
                )

    @functools.cached_property
    def _lengths(self) -> dict[str, int | None]:
        """Number of rows in one pass over each source, or None if the source is endless."""
        return {name: _num_rows(source) for name, source in self.sources.items()}

    @functools.cached_property
    def _phases(self) -> list[tuple[int, tuple[int, ...]]]:
        """The phases of the schedule: (first batch, integer weights)."""
        phases: list[tuple[int, Weights]] = (
            [(0, self.weights)]
            if isinstance(self.weights, Mapping)
            else [(start, weights) for start, weights in self.weights]
        )
        starts = [start for start, _ in phases]
        require(
            all(isinstance(start, int) for start in starts)
            and starts[:1] == [0]
            and all(a < b for a, b in pairwise(starts)),
            "Mixture.weights",
            self.weights,
            "weights keyed by name, or pairs (batch, weights) with increasing batches from 0",
        )
        return [(start, self._parts(weights)) for start, weights in phases]

    @functools.cached_property
    def _schedule(self) -> Schedule:
        return Schedule([(start * self.batch_size, parts) for start, parts in self._phases])

    def _parts(self, weights: Weights) -> tuple[int, ...]:
        for name in weights:
            if name not in self.sources:
                known = ", ".join(sorted(self.sources))
                raise ConfigError(
                    f"Mixture.weights contains {name!r}, but there is no source {name!r}. The "
                    f"sources are {known}.{did_you_mean(str(name), self.sources)}"
                )
        if missing := [name for name in self.sources if name not in weights]:
            raise ConfigError(
                f"Mixture.weights has no weight for {missing}. Specify a weight for each source; a "
                "weight of 0 excludes it."
            )
        values = [weights[name] for name in self.sources]
        require(
            all(0 <= value < math.inf for value in values) and sum(values) > 0,
            "Mixture.weights",
            dict(weights),
            "non-negative numbers that are not all 0",
        )
        # Sources whose rows contain more tokens are drawn less often.
        if self.unit == "tokens":
            return rounded_parts(
                [value / tokens for value, tokens in zip(values, self._tokens_per_row, strict=True)]
            )
        parts = exact_parts(values)
        if parts is None:
            raise ConfigError(
                f"Mixture.weights: {dict(weights)} have no small common denominator: the sum of "
                f"the equivalent integers exceeds {MAX_PERIOD:,}. Use fewer digits, such as 0.35."
            )
        return parts

    @functools.cached_property
    def _tokens_per_row(self) -> list[float]:
        """The mean number of tokens per row for each source."""
        return [
            _tokens_per_row(name, source, self._lengths[name])
            for name, source in self.sources.items()
        ]

    @functools.cached_property
    def _end(self) -> int | None:
        """The first position at which a finite source would repeat, or None."""
        positions = [
            self._schedule.position_of(number, length)
            for number, length in enumerate(self._lengths.values())
            if length is not None
        ]
        return min((position for position in positions if position is not None), default=None)

    @property
    def num_batches(self) -> int | None:
        if self.stop == "never" or self._end is None:
            return None
        return -(-self._end // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        first = next(iter(self.sources.values()))
        return spec_of_rows(first.element_spec(), self.batch_size)

    def largest_id(self) -> int:
        """Returns the largest token id in all sources, or 0 if it is unknown for every source."""
        largest_ids = (source.largest_id() for source in self.sources.values())
        return max((largest for largest in largest_ids if largest is not None), default=0)

    def sources_of(self, first: int, count: int) -> np.ndarray:
        """Returns the source index of rows first, ..., first + count - 1 as int16[count]."""
        return self._schedule.sources_at(first, count)

    def example_of(self, index: int, row: int) -> str:
        position = index * self.batch_size + row
        if self.stop == "first" and self._end is not None and position >= self._end:
            return ""
        number = int(self.sources_of(position, 1)[0])
        name, source = list(self.sources.items())[number]
        # The index of this row in its source.
        source_row = int(self._schedule.counts_before(position)[number])
        if length := self._lengths[name]:
            source_row %= length
        example = source.example_of(*divmod(source_row, source.batch_size))
        return f"{name}: {example}" if example else f"from the source {name}"

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        batch = zero_rows(self.element_spec(), count)
        # Rows after the end are padding.
        if self.stop == "first" and self._end is not None:
            count = max(0, min(count, self._end - first))
        numbers, counts = self.sources_of(first, count), self._schedule.counts_before(first)
        for number, (name, source) in enumerate(self.sources.items()):
            targets = np.flatnonzero(numbers == number)  # Rows in the batch to fill.
            chunks = _row_chunks(source, self._lengths[name], int(counts[number]), len(targets))
            for chunk in chunks:
                # A chunk fills the first of the rows that remain.
                filled, targets = np.split(targets, [len(next(iter(chunk.values())))])
                for leaf, values in chunk.items():
                    batch[leaf][filled] = values
        return batch

    def fingerprint(self) -> dict[str, Any]:
        return self.settings_fingerprint("batch_size", "stop", "unit") | {
            "weights": [
                [start, dict(zip(self.sources, parts, strict=True))]
                for start, parts in self._phases
            ],
            "sources": {name: source.fingerprint() for name, source in self.sources.items()},
        }


def _num_rows(source: IndexedPipeline) -> int | None:
    """Returns the number of rows in one pass, excluding padding, or None for an endless source."""
    if source.num_batches is None or source.num_batches == 0:
        return source.num_batches
    # Rows of the last batch whose weights are all 0 are padding.
    last_batch = source.rows(source.num_batches - 1, slice(0, source.batch_size))
    weights = last_batch.get("weights")
    if weights is None:
        return source.num_batches * source.batch_size
    is_real = weights.reshape(len(weights), -1).any(axis=1)
    num_in_last = int(np.flatnonzero(is_real)[-1]) + 1 if is_real.any() else 0
    return (source.num_batches - 1) * source.batch_size + num_in_last


def _row_chunks(
    source: IndexedPipeline, length: int | None, first: int, count: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields `count` rows in chunks, starting at row `first`; a finite source repeats."""
    while count:
        row = first if length is None else first % length
        index, start = divmod(row, source.batch_size)
        # A chunk ends with a batch of the source, or with the source's last row.
        stop = min(start + count, source.batch_size)
        if length is not None:
            stop = min(stop, start + length - row)
        yield source.rows(index, slice(start, stop))
        first, count = first + stop - start, count - (stop - start)


def _tokens_per_row(name: str, source: IndexedPipeline, length: int | None) -> float:
    if (tokens := source.tokens_per_row()) is not None:
        require(
            0 < tokens < math.inf,
            f"Mixture.sources[{name!r}].tokens_per_row()",
            tokens,
            "a number above 0",
        )
        return tokens
    # Count the labels in a sample of rows.
    count = _NUM_SAMPLED_ROWS if length is None else min(length, _NUM_SAMPLED_ROWS)
    chunks = _row_chunks(source, length, 0, count)
    return max(1.0, sum(int((chunk["weights"] > 0).sum()) for chunk in chunks)) / count
