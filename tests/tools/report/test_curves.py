"""Fewer points of long curves: no extreme is lost, against a loop over all values."""

import math

import numpy as np
import pytest

from praxis_tools.report.curves import buckets_of, with_extremes


def values_with_everything(num_values, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=num_values)
    values[rng.integers(num_values, size=num_values // 3)] = np.nan
    values[rng.integers(num_values, size=7)] = [np.inf, -np.inf, 1e30, -1e30, np.nan, 0.0, np.inf]
    values[num_values // 2 : num_values // 2 + 97] = np.nan
    return values


@pytest.mark.parametrize("num_lines, most", [(1, 7), (7, 7), (8, 7), (997, 31), (997, 500)])
def test_each_line_is_in_a_bucket_and_there_are_not_too_many(num_lines, most):
    buckets = buckets_of(num_lines, most)
    assert 1 <= len(buckets.starts) <= most
    bounds = [*buckets.starts.tolist(), num_lines]
    assert bounds[0] == 0 and all(np.diff(bounds) > 0)
    assert buckets.ends.tolist() == [bound - 1 for bound in bounds[1:]]
    assert buckets.are_lines == (num_lines <= most)


def test_a_long_run_has_its_first_steps_one_by_one_and_no_wide_bucket():
    sizes = np.diff([*buckets_of(100_000, 2_000).starts, 100_000])
    assert sizes[:50].max() <= 3 and sizes.max() <= math.ceil(100_000 / 1_500)


@pytest.mark.parametrize("most", [7, 64, 1_000])
def test_the_mean_and_the_extremes_of_each_bucket_are_those_of_a_loop(most):
    values = values_with_everything(1_009)
    buckets = buckets_of(len(values), most)
    actual = np.array([buckets.means(values), buckets.lowest(values), buckets.highest(values)])
    expected = []
    for start, end in zip(buckets.starts, buckets.ends, strict=True):
        numbers = [value for value in values[start : end + 1] if not math.isnan(value)]
        finite = [value for value in numbers if math.isfinite(value)]
        expected.append(
            (
                sum(finite) / len(finite) if finite else math.nan,
                min(numbers, default=math.nan),
                max(numbers, default=math.nan),
            )
        )
    np.testing.assert_allclose(actual, np.array(expected).T, rtol=1e-12)


def test_no_lines_have_no_buckets():
    assert len(buckets_of(0, 7).ends) == 0


def test_of_many_points_the_extremes_and_the_last_stay():
    values = values_with_everything(1_009)
    kept = with_extremes(values, 101)
    assert len(kept) <= 101 and kept.tolist() == sorted(set(kept.tolist()))
    assert {int(np.nanargmin(values)), int(np.nanargmax(values)), 1_008} <= set(kept.tolist())
    assert with_extremes(values[:7], 7).tolist() == list(range(7))
