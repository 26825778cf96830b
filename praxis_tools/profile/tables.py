"""Creates the tables of a profile from its files, for `praxis profile` and for a training hook."""

from pathlib import Path

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.hooks.hook import Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_tools.plan.residuals import append_residual
from praxis_tools.profile.measured import Measured, measure
from praxis_tools.profile.peak_memory import PeakMemory, peak_memory
from praxis_tools.profile.profile_text import profile_text

PROFILE_TXT = "profile.txt"
_PRINTED_ROWS = 6  # Maximum number of rows of each kind in a job's output.


def tables_of(folder: Path) -> str:
    """Returns the tables of a profile.

    Raises:
      ConfigError: A file is missing or damaged.
    """
    return profile_text(*_read(folder))


def _read(folder: Path) -> tuple[Measured, PeakMemory]:
    try:
        return measure(folder), peak_memory(folder)
    except ConfigError:
        raise
    except Exception as error:  # The parser can raise any exception for damaged text.
        raise ConfigError(
            f"The files in {folder} are damaged, or belong to different programs "
            f"({type(error).__name__}: {error}). Record another profile."
        ) from error


def folder_of(files: JobDir, step: int | None) -> Path:
    """Returns the folder of a profile in a job directory.

    Args:
      files: Job directory.
      step: First step of the profile, or None for the newest profile.

    Raises:
      ConfigError: The profile does not exist.
    """
    steps = sorted(
        int(path.parent.name)
        for path in files.profiles.glob("*/profile.json")
        if path.parent.name.isdecimal()
    )
    if not steps:
        raise ConfigError(
            f"{files.profiles} contains no profile. Train with --set run.profile.steps=FIRST:END, "
            f"or create the file {files.profile_request} while the job is running."
        )
    if step is not None and step not in steps:
        raise ConfigError(
            f"--step is {step}; expected the first step of a profile in {files.profiles}: "
            f"{', '.join(map(str, steps))}.{did_you_mean(str(step), map(str, steps))}"
        )
    return files.profiles / str(steps[-1] if step is None else step)


class ProfileTables(Hook):
    """Prints the tables of each new profile and writes them to its folder.

    The hook also appends the measured and predicted seconds of the step to the job's residuals
    file, which is used to correct later plans.
    """

    every, waits = None, False

    def before_training(self, loop: LoopState, state: object) -> None:
        self._note = loop.note

    def after_profile(self, folder: Path) -> None:
        try:
            measured, memory = _read(folder)
            text = profile_text(measured, memory, _PRINTED_ROWS)
            write_atomically(folder / PROFILE_TXT, f"{profile_text(measured, memory)}\n".encode())
            if measured.residual is not None:
                # The folder is JOB/profiles/STEP.
                append_residual(JobDir(folder.parents[1]).residuals_jsonl, measured.residual)
        except Exception as error:  # A failed profile must not stop the run.
            self._note(f"note: the tables of the profile could not be created: {error}")
            return
        self._note(f"{text}\nmore rows: {folder / PROFILE_TXT}")
