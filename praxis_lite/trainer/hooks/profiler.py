"""Runs JAX's profiler over a few steps and writes its files; its errors never end the run."""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from praxis_lite.core.errors import shown
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.job import processes
from praxis_lite.trainer.hooks.profile_facts import write_facts
from praxis_lite.trainer.job_on_mesh import JobOnMesh

_log = logging.getLogger(__name__)


class Profiler:
    """Traces steps into `profiles/FIRST` in the job's directory, as xprof and TensorBoard read it.

    Every process calls each method; `run.profile.processes` says which of them trace.

    Attributes:
      steps: of the profile that is being made, or None. Kept until its end even if the trace could
        not be begun, so that all processes continue alike.
      note: prints a line.
    """

    def __init__(self, job: JobOnMesh):
        self._job = job
        self._traces = processes.is_first() or job.run.profile.processes == "all"
        self.steps: range | None = None
        self.note: Callable[[str], None] = print
        self._folder: Path | None = None  # Of a trace that runs.
        self._began = 0.0

    def begin(self, steps: range, state: TrainState) -> None:
        """Begins to trace, once the devices have made `state`, which the first step takes."""
        self.steps = steps
        if not self._traces:
            return
        jax.block_until_ready(state)
        folder = self._job.files.profiles / str(steps.start)
        with self._never_ending_the_run(f"no profile is made of {_words(steps)}"):
            if processes.is_first():
                # Of steps that a previous launch made and lost.
                shutil.rmtree(folder, ignore_errors=True)
            unfinished = _unfinished(folder)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            jax.profiler.start_trace(unfinished, profiler_options=_options())
            self._folder, self._began = folder, time.perf_counter()

    def end(self, step: int, state: TrainState) -> Path | None:
        """Writes the files of a profile, whose last step made `state`.

        Returns:
          The folder; None in other processes than the first, and if a file could not be written.
        """
        steps, self.steps = range(self.steps.start, step + 1), None
        folder, self._folder = self._folder, None
        if folder is None:
            return None
        jax.block_until_ready(state)
        seconds, is_kept = time.perf_counter() - self._began, False
        with self._never_ending_the_run(f"the profile of {_words(steps)} is lost"):
            _stop()
            _move(_unfinished(folder), folder / "plugins/profile" / f"step_{steps.start}")
            is_kept = True
        shutil.rmtree(_unfinished(folder), ignore_errors=True)
        if not is_kept or not processes.is_first():
            return None
        self.note(f"profiled {_words(steps)}: {folder}")
        with self._never_ending_the_run(f"{folder} has the trace alone"):
            write_facts(self._job, folder, steps, seconds)
            return folder
        return None

    def discard(self) -> None:
        """Ends an unfinished trace, if there is any, and removes its files."""
        folder, self._folder, steps, self.steps = self._folder, None, self.steps, None
        if folder is not None:
            self.note(f"the profile from step {steps.start} on is given up: training ends before")
            with contextlib.suppress(Exception):
                _stop()
            shutil.rmtree(_unfinished(folder), ignore_errors=True)

    @contextlib.contextmanager
    def _never_ending_the_run(self, outcome: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            words = shown(" ".join(str(error).split()) or type(error).__name__, 300)
            # What other processes than the first print is dropped, but for warnings.
            say = self.note if processes.is_first() else _log.warning
            say(f"{outcome}, and training goes on: {words}")


def _options() -> Any:
    options = jax.profiler.ProfileOptions()
    # Calls of Python take most of a trace, and the time of the steps that they are in.
    options.python_tracer_level = 0
    if hasattr(options, "raise_error_on_start_failure"):
        options.raise_error_on_start_failure = True
    return options


def _stop() -> None:
    try:
        jax.profiler.stop_trace()
    except Exception:
        # JAX still holds a trace that it could not write, and would begin no other one.
        with contextlib.suppress(Exception):
            jax.profiler.stop_trace()
        raise


def _unfinished(folder: Path) -> Path:
    """Returns the folder into which this process traces, next to that of the profile.

    The first process may begin after others, and removes the profile's folder.
    """
    return folder.with_name(f".process_{processes.index()}")


def _move(unfinished: Path, session: Path) -> None:
    """Moves the files that JAX named by host and time to where all processes have theirs."""
    files = [file for file in unfinished.rglob("*") if file.is_file() and file.stat().st_size]
    if not any(file.name.endswith(".xplane.pb") for file in files):
        raise OSError("JAX's profiler has written no trace; the disk may be full")
    session.mkdir(parents=True, exist_ok=True)
    for file in files:
        for ending in (".xplane.pb", ".trace.json.gz"):
            if file.name.endswith(ending):
                file.replace(session / f"process_{processes.index()}{ending}")


def _words(steps: range) -> str:
    """Returns "step 7" or "steps 7 to 9"."""
    return f"step{f's {steps[0]} to' if len(steps) > 1 else ''} {steps[-1]}"
