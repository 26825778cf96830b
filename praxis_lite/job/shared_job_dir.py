"""A job's directory with several processes: the first writes its files, all the checkpoints."""

import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.local_directory import local_directory
from praxis_lite.job.processes.exits import temporary_folder

# A network file system shows a new file to other hosts after a while.
_SEEN_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class OtherJobDir(JobDir):
    """The files of a process that is not the first, in a folder that is removed at its end.

    The checkpoints, the record of the rows that this process fed, and traces of its devices, are in
    the job's directory, `shared`.
    """

    shared: Path
    checkpoints = property(lambda self: JobDir(self.shared).checkpoints)
    examples = property(lambda self: JobDir(self.shared).examples)
    profiles = property(lambda self: JobDir(self.shared).profiles)


def open_shared(path: str, open_dir: Callable[[], JobDir]) -> JobDir:
    """Returns the job's directory as this process uses it; the first process opens it.

    Raises ConfigError as `open_dir`, or if a process does not see the first one's directory.
    """
    shared = local_directory(path)
    if processes.count() == 1:
        return open_dir()
    if processes.is_first():
        job = open_dir()
        # Hidden: an empty directory with nothing else in it is still a new job's.
        mark = job.path / f".shared-{secrets.token_hex(8)}"
        mark.touch()
        try:
            processes.exchange("job_log_dir", mark.name)
            seen = processes.exchange("job_log_dir is seen", "yes")
        finally:
            mark.unlink(missing_ok=True)
    else:
        mark = shared / processes.exchange("job_log_dir", "")[0]
        seen = processes.exchange("job_log_dir is seen", "yes" if _appears(mark) else "no")
    blind = [processes.name(k) for k, word in enumerate(seen) if word == "no"]
    if blind:
        raise ConfigError(
            f"--job_log_dir={path}: {' and '.join(blind)} cannot see what {processes.name(0)} "
            "writes there, but all processes write the checkpoints. Name a directory that all "
            "hosts share, by the same absolute path."
        )
    if not processes.is_first():
        job = OtherJobDir(temporary_folder(), shared)
        # The files that are read when a job resumes.
        for source in (JobDir(shared).config_json, JobDir(shared).eval_metrics_jsonl):
            if source.is_file():
                shutil.copy(source, job.path / source.name)
    processes.exchange("job_log_dir is open", "")  # Until then the first one writes nothing.
    return job


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
