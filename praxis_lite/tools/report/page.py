"""The page of --mode=report --html=FILE: report_page.html with a document in it.

It asks nothing of the network. Its script makes text nodes only, and without a script it has the
loss curves.
"""

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from praxis_lite.tools.report.curve_svg import curve_svg
from praxis_lite.tools.report.job_reader import JobState


def page(jobs: Sequence[JobState], document: Mapping[str, Any]) -> str:
    """Returns a whole HTML page of jobs.

    Args:
      document: of the same jobs.
    """
    template = (resources.files(__package__) / "report_page.html").read_text("utf-8")
    # In a script element only "<" can end it; names may hold anything.
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(", ".join(job.name for job in jobs)),
        "curves": curve_svg(jobs, next(iter(document["metrics"]), "loss")),
        "document": text,
    }
    # What is put in is not looked at again, whatever it holds.
    pieces = [template]
    for name, value in parts.items():
        before, after = pieces.pop().split("{{" + name + "}}")
        pieces += [before, value, after]
    return "".join(pieces)
