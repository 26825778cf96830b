"""A mixture of pipelines, with rows in the ratios of their weights."""

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
from praxis_lite.inputs.mixing.schedule import MOST_PARTS, Schedule, parts_of, rounded_parts

if TYPE_CHECKING:
    import jax

Weights = Mapping[str, float]
_NUM_MEASURED = 1024  # Rows of a source whose tokens are counted.


@dataclasses.dataclass(eq=False)
class Mixture(IndexedPipeline):
    """Rows of several pipelines, in the ratios of their weights, as a single stream.

    The rows of a source keep their order. At every place of the stream, each source has given its
    share of the rows so far, to within one row. Fractions of a row carry over changes of weights: a
    source whose weight becomes 0 may give one more row. A row's source follows from its place and
    all weights, including later ones, so any batch is found without making others.

    An endless source (`shuffle=True`) continues from epoch to epoch; a finite one starts again.

    Args:
        sources: by name, all with the same leaves and row lengths; their batch sizes do not
            matter.
        weights: of each source, in any unit: {"code": 0.7, "text": 0.3}; 0.7 counts as exactly
            7/10. Or [(0, {...}), (1000, {...})]: from these batches on.
        batch_size: rows of the global batch.
        stop: "never", or "first": when the first source has given all its rows.
        unit: weights are shares of "examples" (rows) or of "tokens" (labels with a weight). The
            tokens of a row are its source's `tokens_per_row()`, the mean of an epoch; without that
            method, the mean of the first 1,024 rows.
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
            isinstance(self.sources, Mapping) and len(self.sources) > 0, "Mixture.sources",
            self.sources, "a dict of one or more pipelines by name",
        )
        for name, source in self.sources.items():
            if not isinstance(source, IndexedPipeline):
                raise ConfigError(
                    f"Mixture: the source {name!r} is a {type(source).__name__}, which has only "
                    "sequential access; expected an IndexedPipeline. Put WithWorkers around the "
                    "mixture, not into it."
                )
            source.check()
        for name, length in self._lengths.items():
            if length == 0:
                raise ConfigError(
                    f"Mixture: the source {name!r} is empty. Remove it, or give it data."
                )
        self._check_leaves()
        _ = self._phases
        if self.stop == "first" and self._end is None:
            raise ConfigError(
                "Mixture.stop is 'first', but no source with a weight has an end: "
                f"{sorted(self.sources)}. Set shuffle=False in one of them, or stop='never'."
            )

    def classes(self) -> dict[str, tuple[str, ...]]:
        return {k: v for source in self.sources.values() for k, v in source.classes().items()}

    def _check_leaves(self) -> None:
        require_same_classes({f"Mixture.sources.{k}": v for k, v in self.sources.items()})
        rows = {
            name: {leaf: (*spec.shape[1:], str(np.dtype(spec.dtype)))
                   for leaf, spec in source.element_spec().items()}
            for name, source in self.sources.items()
        }
        first = next(iter(rows))
        for name, row in rows.items():
            if row != rows[first]:
                raise ConfigError(
                    f"Mixture: a row of {name!r} has {row}, but {first!r} has {rows[first]}. "
                    "Give all sources the same leaves and the same seq_len."
                )

    @functools.cached_property
    def _lengths(self) -> dict[str, int | None]:
        """Rows per pass of each source; None: endless."""
        return {name: _num_rows(source) for name, source in self.sources.items()}

    @functools.cached_property
    def _phases(self) -> list[tuple[int, tuple[int, ...]]]:
        """`[(first_batch, weights)]`: the phases of the schedule."""
        given = self.weights
        phases = [(0, given)] if isinstance(given, Mapping) else [tuple(phase) for phase in given]
        starts = [start for start, _ in phases]
        require(
            all(isinstance(start, int) for start in starts) and starts[:1] == [0]
            and all(a < b for a, b in pairwise(starts)),
            "Mixture.weights", given,
            "weights by name, or pairs (batch, weights) in order, from batch 0 on",
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
                    f"Mixture.weights names {name!r}, but there is no source {name!r}. Known "
                    f"sources: {known}.{did_you_mean(str(name), self.sources)}"
                )
        if missing := [name for name in self.sources if name not in weights]:
            raise ConfigError(
                f"Mixture.weights lacks {missing}. Give each source a weight; 0 leaves it out."
            )
        values = [weights[name] for name in self.sources]
        require(
            all(0 <= value < math.inf for value in values) and sum(values) > 0, "Mixture.weights",
            dict(weights), "numbers from 0 on, at least one above 0",
        )
        if self.unit == "tokens":
            return rounded_parts([
                value / tokens for value, tokens in zip(values, self._tokens, strict=True)
            ])
        parts = parts_of(values)
        if parts is None:
            raise ConfigError(
                f"Mixture.weights: {dict(weights)} have no small common denominator: as integers "
                f"they add up to more than {MOST_PARTS:,}. Write them with fewer digits, "
                "such as 0.35."
            )
        return parts

    @functools.cached_property
    def _tokens(self) -> list[float]:
        """Tokens per row of each source."""
        return [
            _tokens_per_row(name, source, self._lengths[name])
            for name, source in self.sources.items()
        ]

    @functools.cached_property
    def _end(self) -> int | None:
        """The first place whose source has no row left, or None."""
        places = [
            self._schedule.place_of(number, length)
            for number, length in enumerate(self._lengths.values()) if length is not None
        ]
        return min((place for place in places if place is not None), default=None)

    @property
    def num_batches(self) -> int | None:
        if self.stop == "never" or self._end is None:
            return None
        return -(-self._end // self.batch_size)

    def element_spec(self) -> "dict[str, jax.ShapeDtypeStruct]":
        first = next(iter(self.sources.values()))
        return spec_of_rows(first.element_spec(), self.batch_size)

    def largest_id(self) -> int:
        """Returns the largest id of the sources that know theirs, or 0."""
        largest = (source.largest_id() for source in self.sources.values())
        return max((number for number in largest if number is not None), default=0)

    def sources_of(self, first: int, count: int) -> np.ndarray:
        """Returns int16[count]: the number of the source of each row from `first` on."""
        return self._schedule.sources_at(first, count)

    def example_of(self, index: int, row: int) -> str:
        place = index * self.batch_size + row
        if self.stop == "first" and self._end is not None and place >= self._end:
            return ""
        number = int(self.sources_of(place, 1)[0])
        name, source = list(self.sources.items())[number]
        row = int(self._schedule.counts_before(place)[number])
        if length := self._lengths[name]:
            row %= length
        example = source.example_of(*divmod(row, source.batch_size))
        return f"{name}: {example}" if example else f"of the source {name}"

    def rows(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        first, count = index * self.batch_size + rows.start, rows.stop - rows.start
        batch = zero_rows(self.element_spec(), count)
        if self.stop == "first" and self._end is not None:
            count = max(0, min(count, self._end - first))
        drawn, before = self.sources_of(first, count), self._schedule.counts_before(first)
        for number, (name, source) in enumerate(self.sources.items()):
            places = np.flatnonzero(drawn == number)
            for piece in _stream(source, self._lengths[name], int(before[number]), len(places)):
                here, places = np.split(places, [len(next(iter(piece.values())))])
                for leaf, values in piece.items():
                    batch[leaf][here] = values
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
    """Returns the rows of a pass, without the padding of its last batch."""
    if source.num_batches is None or source.num_batches == 0:
        return source.num_batches
    last = source.rows(source.num_batches - 1, slice(0, source.batch_size))
    weights = last.get("weights")
    if weights is None:
        return source.num_batches * source.batch_size
    counts = weights.reshape(len(weights), -1).any(axis=1)
    in_last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    return (source.num_batches - 1) * source.batch_size + in_last


def _stream(
    source: IndexedPipeline, length: int | None, first: int, count: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields rows first, first + 1, ... in pieces; a finite source starts again at its end."""
    while count:
        row = first if length is None else first % length
        index, start = divmod(row, source.batch_size)
        stop = min(start + count, source.batch_size)
        if length is not None:
            stop = min(stop, start + length - row)
        yield source.rows(index, slice(start, stop))
        first, count = first + stop - start, count - (stop - start)


def _tokens_per_row(name: str, source: IndexedPipeline, length: int | None) -> float:
    if (tokens := source.tokens_per_row()) is not None:
        require(
            0 < tokens < math.inf, f"Mixture.sources[{name!r}].tokens_per_row()", tokens,
            "a number above 0",
        )
        return tokens
    count = _NUM_MEASURED if length is None else min(length, _NUM_MEASURED)
    pieces = _stream(source, length, 0, count)
    return max(1.0, sum(int((piece["weights"] > 0).sum()) for piece in pieces)) / count
