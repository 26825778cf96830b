"""The report of jobs: as they are now, or again and again until none of them trains."""

import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from praxis_lite.files.whole_files import write_whole
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.tools.report.document import MOST_LETTERS, document
from praxis_lite.tools.report.job_reader import JobReader, JobState
from praxis_lite.tools.report.page import page
from praxis_lite.tools.report.text import progress_text, report_text


@dataclasses.dataclass(frozen=True)
class Report:
    """Jobs beside each other, as their files were when they were read.

    It prints as --mode=report does, and a notebook shows its page.

    Attributes:
      jobs: with their metrics, evaluations, settings and samples.
      read_at: the time, with its zone.
    """

    jobs: Sequence[JobState] = dataclasses.field(repr=False)
    read_at: datetime.datetime

    def __str__(self) -> str:
        return report_text(self.jobs)

    def _repr_html_(self) -> str:
        from praxis_lite.tools.explain.explain_page import in_notebook

        return in_notebook(self.page(), height=900)

    def page(self, *, reload_seconds: float | None = None) -> str:
        """Returns the page of --html: a whole HTML page that asks nothing of the network.

        Args:
          reload_seconds: after which an open page asks for a newer one; None: never.
        """
        return page(
            self.jobs, document(self.jobs, written=self.read_at, reload_seconds=reload_seconds)
        )


class ReportReader:
    """Reads jobs as often as it is asked; lines that it has read it does not read again.

    A job that trains is never waited for and never holds anything up: only its files are read.
    """

    def __init__(self, jobs: Mapping[str, JobDir]):
        self._readers = [JobReader(name, files) for name, files in jobs.items()]

    def read(self) -> Report:
        """Returns the report of now; raises ConfigError if a job cannot be read."""
        most_letters = MOST_LETTERS // len(self._readers)
        jobs = [reader.read(most_letters) for reader in self._readers]
        return Report(jobs, datetime.datetime.now().astimezone())


def told_reports(
    reader: ReportReader, *, html: Path | None, follow_seconds: float | None,
    write_line: Callable[[str], None] = print, sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints a report and writes its page, once or until no job trains any longer.

    Args:
      html: the page's file, which is replaced whole each time; None: none is written.
      follow_seconds: between two readings; None: it reads once.

    Raises:
      ConfigError: a job cannot be read, or the page cannot be written.
    """
    if follow_seconds is not None and html is not None:
        write_line(f"writing {html} every {follow_seconds:g} s while a job trains")
    told: dict[str, int] = {}
    while True:
        report = reader.read()
        follows = follow_seconds is not None and any(job.is_training for job in report.jobs)
        if html is not None:
            text = report.page(reload_seconds=follow_seconds if follows else None)
            write_whole(html, text.encode("utf-8", "replace"))
        if not follows:
            break
        for job in report.jobs:
            if told.get(job.name) != job.last_step:
                told[job.name] = job.last_step
                write_line(progress_text(job))
        sleep(follow_seconds)
    write_line(str(report))
    if html is not None:
        write_line(f"\nThe page to look at in a browser: {html.absolute()}")
