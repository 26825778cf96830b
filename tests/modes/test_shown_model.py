"""The picture and the last numbers of a trained model as a notebook shows them."""

import base64
import re

import numpy as np

from praxis_lite.trained_model.shown_model import html_of, text_of

METRICS = {
    "step": np.arange(1, 38), "loss": np.linspace(4.0, 1.0, 37),
    "mfu": np.full(37, np.nan),
}
EVALUATIONS = {"held<out>": {"step": np.array([10, 37]), "loss": np.array([3.5, 1.5])}}


def test_the_last_numbers_are_shown_and_names_are_escaped():
    html = html_of("Tiny", "/jobs/tiny", METRICS, EVALUATIONS, b"a picture")
    assert "step 37: loss 1<" in html and "mfu" not in html
    assert "held&lt;out&gt;" in html and "step 37: loss 1.5" in html and "<out>" not in html
    assert text_of(METRICS, EVALUATIONS) == ", loss 1.0000, held<out> loss 1.5000"
    (data,) = re.findall('src="data:image/png;base64,([^"]+)"', html)
    assert base64.b64decode(data) == b"a picture"


def test_a_job_without_a_step_or_a_picture_is_shown():
    html = html_of("Tiny", "/jobs/tiny", {}, {})
    assert "<img" not in html and "step" not in html and text_of({}, {}) == ""
