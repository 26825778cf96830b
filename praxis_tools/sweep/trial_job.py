"""The training job of a trial: its command, process, output and metric."""

import contextlib
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import praxis_lite
from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.host.file_reading import opened
from praxis_lite.host.object_stores import AnyPath, StorePath
from praxis_lite.job.job_dir import job_dir_at
from praxis_lite.job.processes.logs import message_of
from praxis_lite.trainer.job_history import evaluations, is_complete
from praxis_lite.trainer.metrics.columns import MetricsColumns
from praxis_tools.sweep.sweep_settings import SweepSettings

# Maximum number of training losses of a trial that are reported to the pruner.
_MAX_LOSSES = 50
_REFRESH_SECONDS = 10.0
_MAX_OUTPUT = 1 << 20  # Maximum number of bytes to read from the end of a launch's output.
# Makes the kernel send SIGHUP to the process when its parent exits (PR_SET_PDEATHSIG), and executes
# the command in the arguments. SIGTERM cannot be used, because the kernel sends the signal for each
# thread of the parent that exits, and a job exits immediately on the second SIGTERM.
_END_WITH_PARENT = (
    "import ctypes, os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "ctypes.CDLL(None).prctl(1, signal.SIGHUP); os.execv(sys.argv[1], sys.argv[1:])"
)

Values = list[tuple[int, float]]


class TrialJob:
    """The training job of a trial, in the directory SWEEP/trials/NNNN.

    Attributes:
      files: Job directory.
      output: File with the output of the job's processes, SWEEP/trials/NNNN.txt. In an object
        store, this is a local file, which `upload_output` uploads.
      metric: Name of the metric that ranks the trials.
    """

    def __init__(
        self, sweep_dir: AnyPath, number: int, sweep: SweepSettings, settings: Sequence[str]
    ):
        folder, output = (sweep_dir / "trials" / f"{number:04d}{end}" for end in ("", ".txt"))
        self.files = job_dir_at(str(folder))
        self._shared_output = output
        self.output = output if isinstance(output, Path) else self.files.path.parent / output.name
        self.metric, self._sweep, self._settings = sweep.metric, sweep, settings
        self._metrics = MetricsColumns(self.files.metrics_jsonl)
        self._sizes: list[int] = []
        self._refreshed_at = -math.inf
        self._values: Values = []

    def command(self) -> list[str]:
        """Returns the command that trains or resumes the job."""
        return self._main("train", f"--job_log_dir={self.files.location}")

    def _main(self, mode: str, option: str) -> list[str]:
        packages = self._sweep.packages
        return [
            sys.executable,
            "-m",
            "praxis_lite",
            mode,
            self._sweep.experiment,
            option,
            *([f"--packages={','.join(packages)}"] if packages else []),
            "--set",
            *self._settings,
        ]

    def plan_command(self, topology: str) -> list[str]:
        """Returns a command that plans the job and exits with status 2 if the job does not fit."""
        return self._main("plan", f"--topology={topology}")

    def start(self, command: list[str]) -> subprocess.Popen:
        """Starts a command in a process that receives SIGHUP when this process exits (on Linux)."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(self._shared_output, StorePath):
            with contextlib.suppress(FileNotFoundError):  # Append to the output of other launches.
                self._shared_output.download(self.output)
        paths = [str(Path(praxis_lite.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self.output.open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            if sys.platform == "linux":
                command = [sys.executable, "-S", "-c", _END_WITH_PARENT, *command]
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C sends a signal to the entire process group. In a new session, the trial
                # only receives the signal that the sweep forwards.
                start_new_session=True,
            )

    def upload_output(self) -> None:
        """Uploads `output`. Does nothing for a local directory."""
        if isinstance(self._shared_output, StorePath):
            self._shared_output.upload(self.output)

    def refresh(self) -> None:
        """Downloads the job's files that have changed. Does nothing for a local directory."""
        self._refreshed_at = time.monotonic()
        self.files.refresh()

    def is_training(self) -> bool:
        """Returns whether any process is training the job."""
        return self.files.is_training()

    def is_complete(self) -> bool:
        """Returns whether the job has completed its last step and no process is training it."""
        if self.is_training() or not self.files.config_json.is_file():
            return False
        steps = steps_in(self.files.checkpoints).committed()
        packages = {*self._sweep.packages, self._sweep.experiment.partition(".")[0]}
        try:
            return bool(steps) and is_complete(self.files, steps[-1], packages)
        except Error:  # The job's next launch reports the damaged file.
            return False

    def has_stepped(self) -> bool:
        """Returns whether the job has completed a step."""
        with contextlib.suppress(ConfigError):
            self._metrics.read()
        return len(self._metrics.columns()["step"]) > 0

    def values(self) -> Values:
        """Returns the current (step, metric) pairs, sorted by step.

        At most `_MAX_LOSSES` training losses are returned. The files are only read if their sizes
        have changed. While a file is damaged, the previous values are returned. From an object
        store, the files are downloaded every ten seconds, because jobs upload them as often.
        """
        if time.monotonic() - self._refreshed_at > _REFRESH_SECONDS:
            with contextlib.suppress(ConfigError):
                self.refresh()
        paths = self.files.metrics_jsonl, self.files.eval_metrics_jsonl
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if sizes != self._sizes:
            self._sizes = sizes
            with contextlib.suppress(ConfigError):
                self._values = self.read_values(max(1, self._sweep.num_steps // _MAX_LOSSES))
        return self._values

    def read_values(self, every: int = 1) -> Values:
        """Returns (step, metric) pairs, sorted by step.

        Args:
          every: Interval between the returned training losses, in steps.

        Raises:
          ConfigError: The file is damaged.
        """
        dataset, slash, name = self.metric.rpartition("/")
        if not slash:
            self._metrics.read()
            columns = self._metrics.columns()
            steps, losses = columns["step"], columns.get(name, np.empty(0))
            return [
                (int(step), float(loss))
                for step, loss in zip(steps, losses, strict=False)
                if step % every == 0
            ]
        return sorted(
            (step, metrics[name])
            for step, evaluated, metrics in evaluations(self.files)
            if evaluated == dataset and name in metrics
        )

    def lacks_metric(self) -> str:
        """Returns the error message for a missing metric, listing the available metrics."""
        names = sorted(
            {
                f"{dataset}/{name}"
                for _, dataset, metrics in evaluations(self.files)
                for name in metrics
            }
        )
        return f"no metric {self.metric}; its evaluations report {', '.join(names) or 'no metrics'}"

    def last_error(self) -> str:
        """Returns the error that ended the job's last launch, or the last line of its output."""
        if not self.output.exists():
            return ""
        with opened(self.output) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_OUTPUT))
            launch = file.read().decode("utf-8", "replace").rpartition("\n$ ")[2]
        _, error, paragraph = launch.rpartition("\nerror: ")
        text = paragraph if error else message_of((launch.strip().splitlines() or [""])[-1])
        return " ".join(text.split())
