"""Creates job reports, either once or repeatedly until no job is training."""

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources

from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trained_model.shown_model import html_of
from praxis_tools.report.document import MAX_CHARS_OF_SAMPLES, document
from praxis_tools.report.job_reader import JobReader, JobState
from praxis_tools.report.text import progress_text, report_text

_MAX_JOBS_WITHOUT_SCRIPT = 8  # Maximum number of jobs shown if scripts are disabled.


@dataclasses.dataclass(frozen=True)
class Report:
    """A comparison of jobs: `print(report)` shows text, and notebooks display the HTML page.

    Attributes:
      jobs: Snapshots of the jobs, with their metrics, evaluations, settings and samples.
      read_at: Time at which the jobs were read, with a time zone.
    """

    jobs: Sequence[JobState] = dataclasses.field(repr=False)
    read_at: datetime.datetime

    def __str__(self) -> str:
        return report_text(self.jobs)

    def _repr_html_(self) -> str:
        from praxis_tools.explain.explain_page import in_notebook

        return in_notebook(self.page(), height=900)

    def page(self, *, reload_seconds: float | None = None) -> str:
        """Returns the self-contained HTML page that --html writes.

        If scripts are disabled, the page only shows the losses of the first jobs.

        Args:
          reload_seconds: Interval at which an open page reloads itself, or None for never.
        """
        content = document(self.jobs, written=self.read_at, reload_seconds=reload_seconds)
        losses = [
            html_of(job.name, job.path, job.columns, job.evaluations)
            for job in self.jobs[:_MAX_JOBS_WITHOUT_SCRIPT]
        ]
        parts = {
            "title": escape(", ".join(job.name for job in self.jobs)),
            "jobs": "".join(losses),
            # Escape "<", because names can contain any text, such as the end of a script element.
            "document": json.dumps(content, separators=(",", ":"), allow_nan=False).replace(
                "<", "\\u003c"
            ),
        }
        pieces = [(resources.files(__package__) / "report_page.html").read_text("utf-8")]
        for name, value in parts.items():
            # Split at the placeholder instead of replacing it, because previously inserted values
            # may contain "{{name}}".
            before, after = pieces.pop().split("{{" + name + "}}")
            pieces += [before, value, after]
        return "".join(pieces)


class ReportReader:
    """Reads several jobs repeatedly; see `JobReader`."""

    def __init__(self, jobs: Mapping[str, JobDir]):
        self._readers = [JobReader(name, files) for name, files in jobs.items()]

    def read(self) -> Report:
        """Returns a report on the current state. Raises ConfigError if a job cannot be read."""
        max_chars = MAX_CHARS_OF_SAMPLES // len(self._readers)
        jobs = [reader.read(max_chars) for reader in self._readers]
        return Report(jobs, datetime.datetime.now().astimezone())


def print_reports(
    reader: ReportReader,
    *,
    html: AnyPath | None,
    follow_seconds: float | None,
    write_line: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints a report and writes its HTML page, once or until no job is training.

    Args:
      reader: Reader of the jobs.
      html: Path of the HTML page, which is replaced atomically, or None to write no page.
      follow_seconds: Interval between reports, or None to print a single report.
      write_line: Function that prints a line.
      sleep: Function that waits for the given number of seconds.

    Raises:
      ConfigError: A job cannot be read, or the page cannot be written.
    """
    if follow_seconds is not None and html is not None:
        write_line(f"writing {html} every {follow_seconds:g} s while any job is training")
    printed: dict[str, int] = {}
    while True:
        report = reader.read()
        is_training = any(job.is_training for job in report.jobs)
        interval = follow_seconds if is_training else None
        if html is not None:
            text = report.page(reload_seconds=interval)
            write_atomically(html, text.encode("utf-8", "replace"))
        if interval is None:
            break
        for job in report.jobs:
            if printed.get(job.name) != job.last_step:
                printed[job.name] = job.last_step
                write_line(progress_text(job))
        sleep(interval)
    write_line(str(report))
    if html is not None:
        write_line(f"\nOpen this page in a browser: {html.absolute()}")
