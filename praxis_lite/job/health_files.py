"""Health files, with which a cluster's probes check whether a process is alive and training."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from praxis_lite.core.errors import ConfigError, require

__all__ = ("HealthFiles", "health_directory")

# Much shorter than the minute after which a probe considers the process dead, because a busy
# machine may miss many updates.
BEAT_SECONDS = 1.0


class HealthFiles(contextlib.AbstractContextManager):
    """Context manager that maintains two empty files, `alive` and `ready`, in a directory.

    A probe checks the age of `alive` (`find DIR/alive -mmin -1`) and the existence of `ready`.
    Files left by a killed process are removed on entry, and both files are removed on exit. Errors
    in updating `alive` are ignored, because the probe checks the age of the file.

    Args:
      directory: A directory that is used only by this process.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._alive, self._ready = directory / "alive", directory / "ready"
        self._is_ready = False

    def alive(self) -> None:
        """Updates the modification time of `alive`."""
        with contextlib.suppress(OSError):
            self._alive.touch()

    def ready(self, is_ready: bool) -> None:
        """Creates or removes `ready`."""
        if is_ready == self._is_ready:
            return
        with contextlib.suppress(OSError):
            if is_ready:
                self._ready.touch()
            else:
                self._ready.unlink(missing_ok=True)
            self._is_ready = is_ready

    def __enter__(self) -> "HealthFiles":
        """Raises ConfigError if the directory cannot be created or written to."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._ready.unlink(missing_ok=True)
            self._alive.touch()
        except OSError as error:
            raise ConfigError(
                f"--health_dir={self._directory} cannot be written: {error.strerror or error}. "
                "Use a local directory that this user may write to."
            ) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        for path in (self._ready, self._alive):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class HealthBeat(contextlib.AbstractContextManager):
    """Context manager that updates `alive` every second unless the process hangs.

    Attributes:
      files: The health files.
      is_hung: Function that returns whether the process hangs. A separate thread calls this
        function before each update. While C code holds the GIL, the thread cannot run, so the file
        is not updated either.
    """

    def __init__(self, files: HealthFiles):
        self.files = files
        self.is_hung: Callable[[], bool] = lambda: False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="health", daemon=True)

    def __enter__(self) -> "HealthBeat":
        self.files.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.files.__exit__(*exc_info)

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            if not self.is_hung():
                self.files.alive()


def health_directory(given: str, job_log_dir: str | None) -> Path:
    """Returns the directory for --health_dir. Raises ConfigError if it is in --job_log_dir."""
    directory = Path(given)
    require(
        job_log_dir is None or not directory.resolve().is_relative_to(Path(job_log_dir).resolve()),
        "--health_dir",
        given,
        "a directory outside --job_log_dir, because all hosts share --job_log_dir",
        "Use a local directory for this process alone, such as /tmp/health.",
    )
    return directory
