"""The jobs of a report, each with a name that no other of them has."""

import os
from collections.abc import Sequence
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.job.job_dir import JobDir, open_for_reading


def named_jobs(paths: Sequence[str]) -> dict[str, JobDir]:
    """Returns the jobs by name: the end of the path, as long as it must be to tell them apart.

    A job that is named twice is there once.

    Raises:
      ConfigError: there is no path, or a path is no job's.
    """
    if not paths:
        raise ConfigError(
            "A report needs the directory of at least one job: --mode=report JOB [JOB ...]."
        )
    jobs: dict[str, JobDir] = {}
    for path in paths:
        job = open_for_reading(path, writes=False)
        jobs.setdefault(os.path.realpath(job.path), job)
    parts = [job.path.parts for job in jobs.values()]
    return {_shortest(job.path.parts, parts): job for job in jobs.values()}


def _shortest(name: tuple[str, ...], names: Sequence[tuple[str, ...]]) -> str:
    for size in range(1, len(name) + 1):
        if sum(other[-size:] == name[-size:] for other in names) == 1:
            break
    return str(Path(*name[-size:]))
