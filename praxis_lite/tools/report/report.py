"""The report of jobs: told once, or again and again until none of them trains."""

import datetime
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from praxis_lite.files.whole_files import write_whole
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.tools.report.document import MOST_LETTERS, document
from praxis_lite.tools.report.job_reader import JobReader, JobState
from praxis_lite.tools.report.page import page
from praxis_lite.tools.report.text import progress_text, report_text


def report(
    jobs: Mapping[str, JobDir], *, html: Path | None, follow_seconds: float | None,
    write_line: Callable[[str], None] = print, sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Tells what jobs came to, and writes a page.

    A job that trains is never waited for and never holds anything up: only its files are read.

    Args:
      jobs: by name.
      html: the page's file, which is replaced whole each time; None: none is written.
      follow_seconds: between two readings, until no job trains any longer; None: read once.

    Raises:
      ConfigError: a job cannot be read, or the page cannot be written.
    """
    readers = [JobReader(name, files) for name, files in jobs.items()]
    if follow_seconds is not None and html is not None:
        write_line(f"writing {html} every {follow_seconds:g} s while a job trains")
    told: dict[str, int] = {}
    while True:
        states = [reader.read(MOST_LETTERS // len(readers)) for reader in readers]
        follows = follow_seconds is not None and any(state.is_training for state in states)
        if html is not None:
            _write(html, states, follow_seconds if follows else None)
        if not follows:
            break
        for state in states:
            if told.get(state.name) != state.last_step:
                told[state.name] = state.last_step
                write_line(progress_text(state))
        sleep(follow_seconds)
    write_line(report_text(states))
    if html is not None:
        write_line(f"\nwritten: {html}")


def _write(html: Path, states: list[JobState], reload_seconds: float | None) -> None:
    now = datetime.datetime.now().astimezone()
    text = page(states, document(states, written=now, reload_seconds=reload_seconds))
    write_whole(html, text.encode("utf-8", "replace"))
