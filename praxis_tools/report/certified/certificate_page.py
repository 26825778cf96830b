"""Formats a job certificate as text and as an HTML page without scripts."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from praxis_lite.core.errors import printable, shortened
from praxis_lite.host.text_table import table_lines
from praxis_lite.trained_model.shown_model import html_of
from praxis_tools.report.certified.certificate import Certificate, CertifiedJob
from praxis_tools.report.job_reader import JobState
from praxis_tools.report.text import changes_text

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:24px auto;padding:0 16px}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}"
)


def text_of(certificate: Certificate) -> str:
    """Formats the certificate as text for a terminal."""
    parts = [_job_text(job) for job in certificate.jobs]
    num_faults = len(certificate.faults)
    plural = "s" * (num_faults != 1)
    parts.append(f"{num_faults} fault{plural}" if num_faults else "no faults were found")
    return "\n\n".join(parts)


def page_of(certificate: Certificate, states: Mapping[str, JobState]) -> str:
    """Formats the certificate as an HTML page.

    Args:
      certificate: The certificate.
      states: Maps the name of each job to its snapshot, which provides the curves and the elastic
        generations.
    """
    title = escape(f"Certificate of {', '.join(job.name for job in certificate.jobs)}")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">",
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>{escape(certificate.written)}; SHA-256 {certificate.as_json()['sha256']}. To verify "
        "it: <code>praxis certify JOB --verify=FILE.json</code></p>",
    ]
    for job in certificate.jobs:
        state = states[job.name]
        text = "\n\n".join(filter(None, [_job_text(job), changes_text(state)]))
        curves = html_of("losses", state.path, state.columns, state.evaluations)
        parts += [f"<h2>{escape(job.name)}</h2>", curves, f"<pre>{escape(printable(text))}</pre>"]
    return "\n".join([*parts, "</body></html>", ""])


def _job_text(job: CertifiedJob) -> str:
    rows = [
        [
            fact.section,
            fact.name,
            _text(fact.value)
            if fact.value is not None
            else f"none: {shortened(fact.why_not, 300)}",
        ]
        for fact in job.facts
    ]
    return printable(
        "\n".join(
            [
                f"{job.name}: to step {job.scope.last_step}",
                *table_lines(rows),
                *(f"WRONG: {fault}" for fault in job.faults),
            ]
        )
    )


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return shortened(value if isinstance(value, str) else json.dumps(value), 200)
