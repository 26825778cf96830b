"""Checks that the results of a row do not depend on other rows, its position or its batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.sharding.batch_sharding import is_true_row, num_rows_of
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.check import Check
from praxis_tools.check.parts import data
from praxis_tools.check.runs.on_mesh import Batch, Leaves, TaskRunner

Batches = list[dict[str, np.ndarray]]
Run = Callable[[Batch, bool], Leaves]
EXAMPLES = "examples/"


def shuffled(batches: Sequence[Batch]) -> tuple[Batches, np.ndarray]:
    """Returns batches of the same rows in another order, and that order.

    Row i of the new batches, counted through all of them, was row `order[i]` of the old ones.
    """
    num_rows = num_rows_of(batches[0])
    order = np.random.default_rng(11).permutation(num_rows * len(batches))
    together = {
        name: np.concatenate([batch[name] for batch in batches])[order] if x.ndim else x
        for name, x in batches[0].items()
    }
    return list(blocks(together, num_rows)), order


def blocks(batch: Batch, num_rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows of a batch, `num_rows` at a time, and the rest."""
    for start in range(0, num_rows_of(batch), num_rows):
        yield data.with_rows(batch, slice(start, start + num_rows))


def with_padding_rows(
    batch: Batch, num_padding_rows: int, contents: Batch
) -> dict[str, np.ndarray]:
    """Returns a batch whose last rows have no weight, and other contents."""
    result = {}
    for name, x in batch.items():
        x = x.copy()
        if x.ndim:
            x[-num_padding_rows:] = 0 if name == "weights" else contents[name][:num_padding_rows]
        result[name] = x
    return result


def halves(batch: Batch) -> Batches:
    """Returns a batch twice, with weights in complementary rows."""
    num_rows = len(batch["weights"])
    is_first = np.arange(num_rows) < num_rows // 2 + 1
    shape = (num_rows,) + (1,) * (batch["weights"].ndim - 1)
    return [
        {**batch, "weights": batch["weights"] * mask.reshape(shape)}
        for mask in (is_first, ~is_first)
    ]


def sums(reports: Sequence[Leaves]) -> Leaves:
    """Returns the metrics and gradients of several batches taken together: means by weight."""
    result = {}
    for name in (item.removesuffix("/value") for item in reports[0] if item.endswith("/value")):
        weights = [report[f"{name}/weight"] for report in reports]
        result[f"{name}/value"] = _mean([report[f"{name}/value"] for report in reports], weights)
        result[f"{name}/weight"] = sum(weights)
    weights = [report["metrics/loss/weight"] for report in reports]
    for name in (item for item in reports[0] if item.startswith("gradients/")):
        result[name] = _mean([report[name] for report in reports], weights)
    return result


def _mean(values: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> np.ndarray:
    total = sum(weights)
    scaled = sum(np.where(w != 0, x * w, 0.0) for x, w in zip(values, weights, strict=True))
    return scaled / np.where(total == 0, 1.0, total)


def in_training(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Metrics and gradients of rows that change places and batches, and of all in a batch."""
    yield from _sums_over_rows(
        check, "", check.batches[:2], check.full_batch,
        lambda batch, nudged: check.train_once(check.one_device, batch, nudged=nudged)[0],
    )


def in_evaluation(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """The same in an evaluation; and the outputs of each row at other positions."""
    plain = check.one_device
    for what, local in check.evaluated.items():
        batches, whole = (check.batches[:2], check.full_batch) if what == "" else ([local], None)
        is_random = plain.traced(plain.partitioner.eval_examples, batches[0]).draws

        def run(batch: Batch, nudged: bool, is_random: bool = is_random) -> Leaves:
            state = check.nudged if nudged else check.state
            return plain.evaluate(state.mdl_vars, batch, without_randomness=is_random)

        yield from _sums_over_rows(check, f"evaluation{what}, ", batches, whole, run)


def in_decoding(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Outputs of each row at other positions, and next to other padding rows."""
    for pipeline in check.job.decode_datasets.values():
        if not check.couplings:
            batches = [check.with_known_ids(batch) for batch in data.first_batches(pipeline, 2)]
            yield from _of_prompts(check, batches)


def _of_prompts(check: Check, batches: Batches) -> Iterator[list[Comparison]]:
    plain, num_rows = check.one_device, num_rows_of(batches[0])
    is_random = plain.traced(plain.partitioner.decode_step, batches[0]).draws

    def run(batch: Batch, is_nudged: bool = False) -> Leaves:
        mdl_vars = (check.nudged if is_nudged else check.state).mdl_vars
        result = plain.decode(mdl_vars, batch, without_randomness=is_random)
        return {k: x for k, x in result.items() if x.ndim and len(x) == num_rows_of(batch)}

    others, order = shuffled(batches)
    expected, nudged = (
        _concatenated([run(item, is_nudged) for item in batches]) for is_nudged in (False, True)
    )
    yield tolerances.in_float64(
        plain.name, "decoding, rows moved", _taken(expected, order),
        _concatenated(list(map(run, others))), _taken(nudged, order),
    )
    if "weights" not in batches[0] or num_rows < 2:
        return
    true = slice(0, num_rows - num_rows // 2)
    reverse = data.with_rows(batches[-1], slice(None, None, -1))
    filled = with_padding_rows(batches[0], num_rows - true.stop, reverse)
    expected, nudged, actual = (_taken(x, true) for x in (expected, nudged, run(filled)))
    yield tolerances.in_float64(
        plain.name, "decoding, other rows of filler", expected, actual, nudged
    )
    what = "decoding, fewer rows"
    fewer = check.tried(what, lambda: run(data.with_rows(filled, true)))
    if fewer is not None:
        yield tolerances.in_float64(plain.name, what, expected, fewer, nudged)


def _sums_over_rows(
    check: Check, prefix: str, batches: Sequence[Batch], whole: Batch | None, run: Run
) -> Iterator[list[Comparison]]:
    """Yields comparisons of batches with the same rows in other batches, on a single device.

    Args:
      prefix: of the names of the comparisons.
      batches: of equally many rows.
      whole: a batch of more rows, or None.
      run: (batch, whether weights are moved by rounding) -> its report.
    """
    if check.couplings:
        return
    if num_rows_of(batches[0]) > 1:
        others, order = shuffled(batches)
        yield _compared(check, f"{prefix}rows moved", batches, others, order, run)
    if whole is not None:
        parts, order = _parts(whole, num_rows_of(batches[0]))
        what = f"{num_rows_of(whole)} rows in parts"
        yield check.tried(
            what, lambda: _compared(check, prefix + what, parts, [whole], order, run)
        ) or []


def _compared(
    check: Check, what: str, batches: Sequence[Batch], others: Sequence[Batch],
    order: np.ndarray, run: Run,
) -> list[Comparison]:
    expected, nudged = ([run(batch, is_nudged) for batch in batches] for is_nudged in (False, True))
    actual = [run(other, False) for other in others]
    kinds = tolerances.by_kind(
        check.one_device.name, sums(expected), sums(actual), sums(nudged), 0
    )
    comparisons = list(map(tolerances.with_epsilon, tolerances.with_what(what, kinds)))
    examples = _examples(expected)
    if examples:
        is_true = np.concatenate([is_true_row(item) for item in batches])
        # Outputs are of true rows alone: the place of a row among these.
        places = np.cumsum(is_true) - 1
        kept = places[order[is_true[order]]]
        comparisons += tolerances.in_float64(
            check.one_device.name, f"outputs, {what}", _taken(examples, kept), _examples(actual),
            _taken(_examples(nudged), kept),
        )
    return comparisons


def _parts(whole: Batch, num_rows: int) -> tuple[Batches, np.ndarray]:
    """Returns the rows of a batch in parts of `num_rows`, and the position of each in them.

    The last part is filled up with rows before it, of weight 0, if rows have weights.
    """
    parts, count = list(blocks(whole, num_rows)), num_rows_of(whole)
    order, left = np.arange(count), count % num_rows
    if left and "weights" in whole:
        missing = num_rows - left
        parts[-1] = {name: x[-num_rows:].copy() if x.ndim else x for name, x in whole.items()}
        parts[-1]["weights"][:missing] = 0
        order[-left:] += missing
    return parts, order


def _examples(reports: Sequence[Leaves]) -> Leaves:
    return _concatenated([
        {name: x for name, x in report.items() if name.startswith(EXAMPLES)} for report in reports
    ])


def _concatenated(reports: Sequence[Leaves]) -> Leaves:
    return {name: np.concatenate([report[name] for report in reports]) for name in reports[0]}


def _taken(leaves: Leaves, index: Any) -> Leaves:
    return {name: x[index] for name, x in leaves.items()}
