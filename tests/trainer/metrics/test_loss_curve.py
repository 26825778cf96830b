"""The loss curve: drawn from the lines there are, and smoothed as documented."""

import math

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter
from praxis_lite.trainer.metrics.loss_curve import plot_loss_curve, smoothed


def job_with(folder, lines, evaluations=()):
    """Returns the directory of a job with these lines of metrics and evaluations."""
    job = JobDir(folder)
    folder.mkdir(exist_ok=True)
    for path, written in ((job.metrics_jsonl, lines), (job.eval_metrics_jsonl, evaluations)):
        if written:
            with JsonLinesWriter(path, -1) as writer:
                for line in written:
                    writer.write(line)
    return job


def pixels_of(path):
    from matplotlib import image

    return image.imread(path)[..., :3]


def test_smoothing_is_the_mean_of_the_neighbors_and_a_line_through_them_at_the_start():
    values = np.random.default_rng(7).normal(size=257)
    values[[0, 3, 101, 102]] = [9.0, math.nan, math.nan, math.inf]
    want = []
    for index in range(257):
        low, high = max(index - 5, 0), index + 6  # 2% of 257; cut off at both ends
        near, steps = values[low:high], np.arange(low, 257)[: high - low]
        finite = np.isfinite(near)
        line = np.polyfit(steps[finite], near[finite], 1 if index < 5 else 0)
        want.append(np.polyval(line, index))
    np.testing.assert_allclose(smoothed(values), want, rtol=1e-9)


def test_a_first_step_off_the_curve_makes_no_kink_and_a_steep_start_is_no_plateau():
    descent = 5 - 0.01 * np.arange(1013)
    np.testing.assert_allclose(smoothed(descent)[:993], descent[:993], rtol=1e-12)
    noisy = descent + np.where(np.arange(1013) == 0, 0.5, 0.0)
    drops = -np.diff(smoothed(noisy)[:40])
    assert np.all(drops > 0) and drops[0] < 0.05


def test_nothing_finite_stays_nan():
    assert np.isnan(smoothed(np.full(7, math.nan))).all()


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 1, "loss": 2.0}],
        [{"step": step, "loss": math.nan, "learning_rate": 0.0} for step in range(1, 8)],
        [{"step": step, "loss": 5 / step, "learning_rate": 1e-3} for step in range(1, 38)],
    ],
    ids=["one step", "nothing finite", "constant rate"],
)
def test_any_run_can_be_drawn(tmp_path, lines):
    job = job_with(tmp_path, lines)
    plot_loss_curve(job, r"no formula: $\frac$")
    assert pixels_of(job.loss_curve_png).std() > 0


def test_evaluations_and_learning_rate_are_drawn(tmp_path):
    steps = range(1, 38)
    lines = [{"step": s, "loss": 5 / s} for s in steps]
    rates = [line | {"learning_rate": 1e-3 * line["step"]} for line in lines]
    evaluations = [
        {"step": s, "dataset": r"$\frac$", "loss": 6 / s, "bits_per_byte": 8 / s} for s in (13, 37)
    ]
    drawn = {}
    for name, written in (
        ("bare", (lines,)),
        ("evaluations", (lines, evaluations)),
        ("rates", (rates,)),
    ):
        job = job_with(tmp_path / name, *written)
        plot_loss_curve(job, "")
        drawn[name] = pixels_of(job.loss_curve_png)

    def num_red(name):
        red, green, blue = np.moveaxis(drawn[name], -1, 0)
        return int(((red > 0.7) & (green < 0.5) & (blue < 0.6)).sum())

    assert num_red("bare") == 0 and num_red("evaluations") > 50
    assert drawn["rates"].shape[0] > drawn["bare"].shape[0]


def test_a_run_without_a_loss_is_an_error_that_names_the_file(tmp_path):
    job = job_with(tmp_path, [{"step": 1, "accuracy": 0.5}])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        plot_loss_curve(job, "")
