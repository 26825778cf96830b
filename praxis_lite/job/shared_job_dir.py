"""Opens a job directory that several processes share; the first process writes most files."""

import contextlib
import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir, job_dir_at
from praxis_lite.job.processes.exits import temporary_folder

# Maximum time until a network file system shows a new file on other hosts.
_VISIBLE_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class OtherJobDir(JobDir):
    """A temporary job directory for a process other than the first.

    Checkpoints, profiles, logs and the records of the rows that were fed to training are written to
    the shared job directory instead.

    Attributes:
      shared: The job's shared directory.
    """

    shared: JobDir
    examples = property(lambda self: self.shared.examples)
    profiles = property(lambda self: self.shared.profiles)

    @property
    def checkpoints(self) -> AnyPath:
        return self.shared.checkpoints

    def log_txt(self, process: int) -> Path:
        return self.shared.log_txt(process)

    def locked(
        self, note: Callable[[str], None], *, is_shared: bool = False
    ) -> contextlib.AbstractContextManager[object]:
        return self.shared.locked(note, is_shared=is_shared)

    def upload(self) -> None:
        self.shared.upload()

    def uploading(self) -> contextlib.AbstractContextManager[None]:
        return self.shared.uploading()


def open_shared(path: str, open_dir: Callable[[], JobDir]) -> JobDir:
    """Opens the job's directory in all processes.

    Args:
      path: The directory, which all hosts must share.
      open_dir: Function that opens the directory. Only called in the first process.

    Returns:
      The job directory in the first process, and an `OtherJobDir` in all other processes.

    Raises:
      ConfigError: `open_dir` raised this error, or a process cannot see the first process's
        directory.
    """
    if processes.count() == 1:
        return open_dir()
    if processes.is_first():
        job = open_dir()
        # Use a hidden file, so that the directory is still treated as empty.
        marker = job.location / f".shared-{secrets.token_hex(8)}"
        marker.write_bytes(b"")
        try:
            processes.exchange("job_log_dir", marker.name)
            answers = processes.exchange("job_log_dir is seen", "yes")
        finally:
            marker.unlink(missing_ok=True)
    else:
        name = processes.exchange("job_log_dir", "")[0]
        shared = job_dir_at(path)
        marker = shared.location / name
        answers = processes.exchange("job_log_dir is seen", "yes" if _appears(marker) else "no")
    without_access = [processes.name(k) for k, answer in enumerate(answers) if answer == "no"]
    if without_access:
        raise ConfigError(
            f"--job_log_dir={path}: {' and '.join(without_access)} cannot see files that "
            f"{processes.name(0)} writes there, but all processes must write checkpoints. Choose a "
            "directory that all hosts share under the same absolute path."
        )
    if not processes.is_first():
        job = OtherJobDir(temporary_folder(), shared)
        # Copy the files that are read when a job resumes.
        for source in (shared.config_json, shared.eval_metrics_jsonl):
            if source.is_file():
                shutil.copy(source, job.path / source.name)
    # The first process must not change these files before all processes have copied them.
    processes.exchange("job_log_dir is open", "")
    return job


def _appears(path: AnyPath) -> bool:
    """Waits for a file to become visible, and returns whether it did."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
