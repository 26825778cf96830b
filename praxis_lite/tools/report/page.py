"""The page of --mode=report --html=FILE: report_page.html with a document in it.

It asks nothing of the network. Its script makes text nodes only, and without a script it shows
the losses of the first jobs.
"""

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from praxis_lite.run.shown_model import html_of
from praxis_lite.tools.report.job_reader import JobState

_MOST_WITHOUT_SCRIPT = 8  # Jobs.


def page(jobs: Sequence[JobState], document: Mapping[str, Any]) -> str:
    """Returns a whole HTML page of jobs.

    Args:
      document: of the same jobs.
    """
    template = (resources.files(__package__) / "report_page.html").read_text("utf-8")
    # In a script element only "<" can end it; names may hold anything.
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    losses = [
        html_of(job.name, job.path, job.columns, job.evaluations)
        for job in jobs[:_MOST_WITHOUT_SCRIPT]
    ]
    parts = {
        "title": html.escape(", ".join(job.name for job in jobs)),
        "jobs": "".join(losses),
        "document": text,
    }
    # What is put in is not looked at again, whatever it holds.
    pieces = [template]
    for name, value in parts.items():
        before, after = pieces.pop().split("{{" + name + "}}")
        pieces += [before, value, after]
    return "".join(pieces)
