"""A certificate of jobs for people: as text, and as a page without scripts."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import printable, shown
from praxis_lite.run.shown_model import html_of
from praxis_lite.run.text_table import table_lines
from praxis_lite.tools.report.certified.certificate import Certificate, CertifiedJob
from praxis_lite.tools.report.certified.facts import Fact
from praxis_lite.tools.report.document import mesh_text
from praxis_lite.tools.report.job_reader import JobState

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:24px auto;padding:0 16px}"
    "table{border-collapse:collapse;margin:8px 0 24px}td,th{padding:4px 14px 4px 0;text-align:left;"
    "vertical-align:top;border-bottom:1px solid #ccc;overflow-wrap:anywhere}"
    "td:nth-child(-n+2){min-width:90px}table.facts td:nth-child(-n+2){white-space:nowrap}"
    ".wrong{color:#b3261e;font-weight:600}.soft{color:#666}code{font-size:12px}"
)


def text_of(certificate: Certificate) -> str:
    """Returns the certificate for a terminal."""
    parts = []
    for job in certificate.jobs:
        rows = [[fact.section, fact.name, _value(fact)] for fact in job.facts]
        lines = [f"{job.name}: to step {job.scope.last_step}", *table_lines(rows)]
        parts.append("\n".join([*lines, *(f"WRONG: {fault}" for fault in job.faults)]))
    number = len(certificate.faults)
    parts.append(f"{number} faults" if number else "nothing is wrong with what was looked at")
    return printable("\n\n".join(parts))


def page_of(certificate: Certificate, states: Mapping[str, JobState]) -> str:
    """Returns a whole HTML page of the certificate.

    Args:
      states: of the same jobs, by name, whose curves and changes of hands are shown.
    """
    document = certificate.as_json()
    title = f"Certificate of {', '.join(job.name for job in certificate.jobs)}"
    parts = [
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=soft>Of {html.escape(certificate.written)}; SHA-256 "
        f"<code>{document['sha256']}</code>. To verify it: <code>main.py --mode=certify JOB "
        "--verify=FILE.json</code></p>",
    ]
    for job in certificate.jobs:
        parts += [f"<h2>{html.escape(job.name)}, to step {job.scope.last_step}</h2>", _verdict(job)]
        parts.append(_table(["", "", ""], [
            [fact.section, fact.name, _value(fact)] for fact in job.facts
        ], "facts"))
        if state := states.get(job.name):
            curve = html_of("losses", state.path, state.columns, state.evaluations)
            parts += [curve, *_changes(state)]
    return "\n".join([*parts, "</body></html>", ""])


def _verdict(job: CertifiedJob) -> str:
    if not job.faults:
        return "<p>Nothing is wrong with what was looked at.</p>"
    faults = "".join(f"<li>{html.escape(printable(fault))}</li>" for fault in job.faults)
    return f"<ul class=wrong>{faults}</ul>"


def _changes(state: JobState) -> list[str]:
    """Returns the changes of hands of a job as a table, or nothing."""
    if not state.changes:
        return []
    rows = [
        [
            str(item.generation), f"{item.kind}: {item.why}",
            "" if item.from_step is None else str(item.from_step), str(item.lost_steps),
            mesh_text(item),
            ", ".join(f"{part} {value:.1f} s" for part, value in item.seconds.items()),
        ]
        for item in state.changes
    ]
    header = ["generation", "why", "from step", "lost steps", "mesh", "seconds"]
    return ["<h3>Changes of hands</h3>", _table(header, rows)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(printable(cell))}</{tag}>" for cell in row)

    head = f"<tr>{cells(header, 'th')}</tr>" if any(header) else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table class='{kind}'>{head}{body}</table>"


def _value(fact: Fact) -> str:
    if fact.value is None:
        return f"none: {shown(fact.why_not, 300)}"
    return _words(fact.value)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(_words(item) for item in value) or "none"
    return shown(value if isinstance(value, str) else json.dumps(value), 200)
