"""Checks that a row's results do not depend on other rows, its position or its batch."""

import functools
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
    """Shuffles the rows of several batches.

    Returns:
      (batches, order): The shuffled batches, and the original index of each row, where rows are
      counted across batches.
    """
    num_rows = num_rows_of(batches[0])
    order = np.random.default_rng(11).permutation(num_rows * len(batches))
    all_rows = {
        name: np.concatenate([batch[name] for batch in batches])[order] if x.ndim else x
        for name, x in batches[0].items()
    }
    return list(blocks(all_rows, num_rows)), order


def blocks(batch: Batch, num_rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields consecutive blocks of at most `num_rows` rows."""
    for start in range(0, num_rows_of(batch), num_rows):
        yield data.with_rows(batch, slice(start, start + num_rows))


def with_padding_rows(
    batch: Batch, num_padding_rows: int, contents: Batch
) -> dict[str, np.ndarray]:
    """Returns a batch whose last rows have weight 0 and the values in `contents`."""
    padded = {}
    for name, x in batch.items():
        x = x.copy()
        if x.ndim:
            x[-num_padding_rows:] = 0 if name == "weights" else contents[name][:num_padding_rows]
        padded[name] = x
    return padded


def halves(batch: Batch) -> Batches:
    """Returns two copies of a batch, each of which has weight 0 for one half of the rows."""
    num_rows = len(batch["weights"])
    is_first = np.arange(num_rows) < num_rows // 2 + 1
    shape = (num_rows,) + (1,) * (batch["weights"].ndim - 1)
    return [
        {**batch, "weights": batch["weights"] * mask.reshape(shape)}
        for mask in (is_first, ~is_first)
    ]


def combine_reports(reports: Sequence[Leaves]) -> Leaves:
    """Combines the metrics and gradients of several batches into weighted means."""
    combined: Leaves = {}
    for name in (key.removesuffix("/value") for key in reports[0] if key.endswith("/value")):
        weights = [report[f"{name}/weight"] for report in reports]
        values = [report[f"{name}/value"] for report in reports]
        combined[f"{name}/value"] = _weighted_mean(values, weights)
        combined[f"{name}/weight"] = _sum(weights)
    weights = [report["metrics/loss/weight"] for report in reports]
    for name in (key for key in reports[0] if key.startswith("gradients/")):
        combined[name] = _weighted_mean([report[name] for report in reports], weights)
    return combined


def _weighted_mean(values: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> np.ndarray:
    total = _sum(weights)
    scaled = _sum([np.where(w != 0, x * w, 0.0) for x, w in zip(values, weights, strict=True)])
    return scaled / np.where(total == 0, 1.0, total)


def _sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, arrays)


def in_training(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares metrics and gradients for shuffled rows and for a full batch split into parts."""
    yield from _compare_regrouped_rows(
        check,
        "",
        check.batches[:2],
        check.full_batch,
        lambda batch, nudged: check.train_once(check.one_device, batch, nudged=nudged)[0],
    )


def in_evaluation(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares evaluation metrics and per-row outputs for shuffled and regrouped rows."""
    one_device = check.one_device
    for suffix, batch in check.evaluated.items():
        batches, full_batch = [batch], None
        if suffix == "":
            batches, full_batch = check.batches[:2], check.full_batch
        is_random = one_device.traced(one_device.partitioner.eval_examples, batches[0]).draws

        def run(batch: Batch, nudged: bool, is_random: bool = is_random) -> Leaves:
            state = check.nudged if nudged else check.state
            return one_device.evaluate(state.mdl_vars, batch, without_randomness=is_random)

        yield from _compare_regrouped_rows(check, f"evaluation{suffix}, ", batches, full_batch, run)


def in_decoding(check: Check, _: TaskRunner) -> Iterator[list[Comparison]]:
    """Compares decoded outputs for shuffled rows and for different padding rows."""
    for pipeline in check.job.decode_datasets.values():
        if not check.couplings:
            batches = [check.with_known_ids(batch) for batch in data.first_batches(pipeline, 2)]
            yield from _compare_decoded_rows(check, batches)


def _compare_decoded_rows(check: Check, batches: Sequence[Batch]) -> Iterator[list[Comparison]]:
    one_device, num_rows = check.one_device, num_rows_of(batches[0])
    is_random = one_device.traced(one_device.partitioner.decode_step, batches[0]).draws

    def run(batch: Batch, is_nudged: bool = False) -> Leaves:
        mdl_vars = (check.nudged if is_nudged else check.state).mdl_vars
        decoded = one_device.decode(mdl_vars, batch, without_randomness=is_random)
        return {k: x for k, x in decoded.items() if x.ndim and len(x) == num_rows_of(batch)}

    # Each row must have the same result in any batch and at any position.
    others, order = shuffled(batches)
    expected, nudged = (
        _concatenate([run(batch, is_nudged) for batch in batches]) for is_nudged in (False, True)
    )
    yield tolerances.in_float64(
        one_device.name,
        "decoding, shuffled rows",
        _take(expected, order),
        _concatenate(list(map(run, others))),
        _take(nudged, order),
    )
    if "weights" not in batches[0] or num_rows < 2:
        return
    # Replace about half of the rows by padding with other contents, and then remove them.
    real_rows = slice(0, num_rows - num_rows // 2)
    reverse = data.with_rows(batches[-1], slice(None, None, -1))
    padded = with_padding_rows(batches[0], num_rows - real_rows.stop, reverse)
    expected, nudged, actual = (_take(x, real_rows) for x in (expected, nudged, run(padded)))
    yield tolerances.in_float64(
        one_device.name, "decoding, other padding rows", expected, actual, nudged
    )
    kind = "decoding of fewer rows"
    fewer = check.run_or_skip(kind, lambda: run(data.with_rows(padded, real_rows)))
    if fewer is not None:
        yield tolerances.in_float64(one_device.name, kind, expected, fewer, nudged)


def _compare_regrouped_rows(
    check: Check, prefix: str, batches: Sequence[Batch], full_batch: Batch | None, run: Run
) -> Iterator[list[Comparison]]:
    """Compares different groupings of the same rows into batches, on a single device.

    Args:
      check: The running check.
      prefix: Prefix for the kind of each comparison.
      batches: Batches with equal numbers of rows.
      full_batch: Batch with more rows, which is compared with its parts; None to skip this
        comparison.
      run: Function that takes (batch, whether weights are perturbed) and returns a report.

    Yields:
      Lists of comparisons.
    """
    if check.couplings:
        return
    if num_rows_of(batches[0]) > 1:
        others, order = shuffled(batches)
        yield _compare_groupings(check, f"{prefix}shuffled rows", batches, others, order, run)
    if full_batch is not None:
        parts, order = _split_into_parts(full_batch, num_rows_of(batches[0]))
        grouping = f"{num_rows_of(full_batch)} rows in parts"

        def compare() -> list[Comparison]:
            return _compare_groupings(check, prefix + grouping, parts, [full_batch], order, run)

        yield check.run_or_skip(grouping, compare) or []


def _compare_groupings(
    check: Check,
    grouping: str,
    batches: Sequence[Batch],
    others: Sequence[Batch],
    order: np.ndarray,
    run: Run,
) -> list[Comparison]:
    """Compares two groupings of the same rows, where `order` is the order from `shuffled`."""
    expected, nudged = ([run(batch, is_nudged) for batch in batches] for is_nudged in (False, True))
    actual = [run(other, False) for other in others]
    comparisons = tolerances.by_kind(
        check.one_device.name,
        combine_reports(expected),
        combine_reports(actual),
        combine_reports(nudged),
        0,
    )
    comparisons = tolerances.with_suffix(grouping, comparisons)
    comparisons = list(map(tolerances.with_loss_epsilon, comparisons))
    examples = _examples(expected)
    if examples:
        is_real = np.concatenate([is_true_row(batch) for batch in batches])
        # Outputs only contain real rows, so convert row numbers to indices among the real rows.
        index_among_real = np.cumsum(is_real) - 1
        real_order = index_among_real[order[is_real[order]]]
        comparisons += tolerances.in_float64(
            check.one_device.name,
            f"outputs, {grouping}",
            _take(examples, real_order),
            _examples(actual),
            _take(_examples(nudged), real_order),
        )
    return comparisons


def _split_into_parts(full_batch: Batch, num_rows: int) -> tuple[Batches, np.ndarray]:
    """Splits a batch into parts of `num_rows` rows.

    If rows have weights, the last part is padded with copies of preceding rows with weight 0.

    Returns:
      (parts, order): The parts, and for each row of the batch, its index in the parts.
    """
    parts, count = list(blocks(full_batch, num_rows)), num_rows_of(full_batch)
    order, remainder = np.arange(count), count % num_rows
    if remainder and "weights" in full_batch:
        missing = num_rows - remainder
        parts[-1] = {name: x[-num_rows:].copy() if x.ndim else x for name, x in full_batch.items()}
        parts[-1]["weights"][:missing] = 0
        order[-remainder:] += missing
    return parts, order


def _examples(reports: Sequence[Leaves]) -> Leaves:
    return _concatenate(
        [{name: x for name, x in report.items() if name.startswith(EXAMPLES)} for report in reports]
    )


def _concatenate(reports: Sequence[Leaves]) -> Leaves:
    return {name: np.concatenate([report[name] for report in reports]) for name in reports[0]}


def _take(leaves: Leaves, index: Any) -> Leaves:
    return {name: x[index] for name, x in leaves.items()}
