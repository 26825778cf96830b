"""The picture and the last numbers of a trained model, read back from the HTML."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from praxis_lite.trained_model.shown_model import html_of, text_of

METRICS = {
    "step": np.arange(1, 38),
    "loss": np.linspace(4.0, 1.0, 37),
    "mfu": np.full(37, np.nan),
}
EVALUATIONS = {"held<out>": {"step": np.array([10, 37]), "loss": np.array([3.5, 1.5])}}


def drawn(html):
    """Returns the SVG's lines and dots as lists of points, in pixels."""
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", html, re.DOTALL)[0])
    tag = "{http://www.w3.org/2000/svg}"
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in svg.iter(f"{tag}polyline")
    ]
    return lines, [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter(f"{tag}circle")]


def test_the_curve_has_each_step_and_each_evaluation_where_it_belongs():
    (line, smooth), dots = drawn(html_of("Tiny", "/jobs/tiny", METRICS, EVALUATIONS))
    assert len(line) == len(smooth) == 37
    # The loss falls evenly, so the points lie on a straight line, from the top left down.
    xs, ys = np.array(line).T
    np.testing.assert_allclose(np.diff(xs), np.diff(xs)[0], atol=0.11)
    np.testing.assert_allclose(np.diff(ys), np.diff(ys)[0], atol=0.11)
    assert np.diff(xs)[0] > 0 and np.diff(ys)[0] > 0
    # A loss of 3.5 is a sixth of the way from 4.0 to 1.0.
    (x, y), _ = dots
    assert x == pytest.approx(xs[9], abs=0.11)
    assert (y - ys[0]) / (ys[-1] - ys[0]) == pytest.approx(1 / 6, abs=0.01)


def test_long_curves_keep_both_ends_and_a_dataset_may_have_any_name():
    steps = np.arange(1, 3_998)
    metrics = {"step": steps, "loss": np.linspace(4.0, 1.0, len(steps))}
    html = html_of("Tiny", "/", metrics, {"training": {"step": steps[-1:], "loss": np.ones(1)}})
    (line, _), ((x, y),) = drawn(html)
    assert len(line) <= 1_000 and line[-1] == (x, y)
    assert f"{steps[-1]:,}" in html and html.count("&#9679;</span> training") == 2


def test_the_last_numbers_are_told_and_names_are_escaped():
    html = html_of("Tiny", "/jobs/tiny", METRICS, EVALUATIONS)
    assert "step 37: loss 1<" in html and "mfu" not in html
    assert "held&lt;out&gt;" in html and "step 37: loss 1.5" in html and "<out>" not in html
    assert text_of(METRICS, EVALUATIONS) == ", loss 1.0000, held<out> loss 1.5000"


def test_a_job_without_a_step_and_losses_that_are_nan_are_shown():
    assert "<svg" not in html_of("Tiny", "/jobs/tiny", {}, {}) and text_of({}, {}) == ""
    losses = np.where(np.arange(37) % 2, METRICS["loss"], np.nan)
    (line, _), _ = drawn(html_of("Tiny", "/", METRICS | {"loss": losses}, {}))
    assert len(line) == 18


@pytest.mark.parametrize(
    "losses",
    [
        [1e30, 1e30, 1e30],
        [1e99, -1e99, 0.0],
        [1e308, 2.0, -1e308],
        [np.inf, 2.0, -np.inf],
    ],
)
def test_losses_of_any_size_are_drawn_in_the_picture(losses):
    lines, _ = drawn(html_of("Tiny", "/", {"step": np.arange(3), "loss": np.array(losses)}, {}))
    assert [len(line) for line in lines] == 2 * [3 if abs(losses[0]) < 1e100 else 1]
    points = np.array(sum(lines, []))
    assert (points > 0).all() and (points < [640, 240]).all()
