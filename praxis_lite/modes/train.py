"""`praxis train`: trains an experiment, or resumes its job."""

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError, Error, require
from praxis_lite.job import processes
from praxis_lite.job.events import IMPORT, INIT, events
from praxis_lite.job.processes.logs import LogFormat, job_log
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.modes.job_from_command import experiment_of, job_on_mesh
from praxis_lite.modes.mode import CommandLine, Mode

if TYPE_CHECKING:
    from praxis_lite.experiment.launched_config import LaunchedConfig
    from praxis_lite.trackers.tracker import Tracker
    from praxis_lite.trainer.hooks.hook import Hook
    from praxis_lite.trainer.job_on_mesh import JobOnMesh
    from praxis_lite.trainer.job_tools import JobTools
    from praxis_lite.trainer.training_loop import TrainingResult


class LastStepUnsound(Error):
    """Training was saved, but the last step was skipped or has a loss that is not finite."""

    exit_status = 3


class Train(Mode):
    """Trains an experiment, or resumes a job that was stopped.

    Args:
      tools: Extensions of the training job, passed to `launch_training`.
    """

    name = "train"
    summary = "trains an experiment, or resumes its job"
    continues_without_output = True
    is_of_many_processes = True

    def __init__(self, tools: "JobTools"):
        self._tools = tools

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        options.add_argument(
            "--metrics_port",
            metavar="N",
            type=_port,
            help="serve the latest metrics for Prometheus at http://localhost:N/metrics; 0 chooses "
            "a free port and prints it",
        )
        options.add_argument(
            "--metrics_host",
            metavar="ADDRESS",
            help="with --metrics_port: address to listen on, 0.0.0.0 for all interfaces; default: "
            "reachable from this machine only",
        )
        options.add_argument(
            "--health_dir",
            metavar="DIR",
            help="directory, for this process only, of the files `alive`, updated every second, "
            "and `ready`, present during training: see docs/clusters.md",
        )
        options.add_argument(
            "--grace_seconds",
            metavar="S",
            type=int,
            help="how long the cluster waits between SIGTERM and SIGKILL; a warning is printed if "
            "a step and a save take longer",
        )
        options.add_argument(
            "--elastic",
            action="store_true",
            help="for several processes: if one dies, hangs or leaves, the others continue on a "
            "mesh of the remaining devices, and it can join again later",
        )
        options.add_argument(
            "--min_processes",
            metavar="N",
            type=int,
            help="with --elastic: minimum number of processes; the job waits if there are fewer; "
            "default: 1",
        )

    def run(
        self,
        command: CommandLine,
        *,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
        health_dir: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Trains the job. Raises ConfigError like `launch_training`."""
        if command.min_processes is not None and not command.elastic:
            raise ConfigError("--min_processes requires --elastic. Add --elastic.")
        if metrics_host is not None and metrics_port is None:
            raise ConfigError("--metrics_host requires --metrics_port. Add --metrics_port=N.")
        trackers: dict[str, Tracker] = {}
        if metrics_port is not None:
            from praxis_lite.trackers.metrics_endpoint import LOOPBACK, MetricsEndpoint

            trackers["--metrics_port"] = MetricsEndpoint(metrics_port, metrics_host or LOOPBACK)
        with contextlib.ExitStack() as stack:
            stack.enter_context(job_log())
            hooks = _cluster_hooks(command, health_dir, grace_seconds, stack)
            train_from_command(
                command, begin_launch(command), self._tools, hooks=hooks, trackers=trackers
            )


def _cluster_hooks(
    command: CommandLine,
    health_dir: str | None,
    grace_seconds: int | None,
    stack: contextlib.ExitStack,
) -> "list[Hook]":
    """Returns hooks for --health_dir and --grace_seconds. `stack` removes the health files."""
    hooks: list[Hook] = []
    require(
        grace_seconds is None or grace_seconds > 0,
        "--grace_seconds",
        grace_seconds,
        "a number of seconds, 1 or more",
    )
    if health_dir is not None or grace_seconds is not None:
        from praxis_lite.job import health_files
        from praxis_lite.modes import on_clusters

        # In an elastic job, the supervisors write these files.
        if health_dir is not None and processes.membership() is None:
            directory = health_files.health_directory(health_dir, command.job_log_dir)
            files = health_files.HealthFiles(directory)
            hooks.append(on_clusters.Health(stack.enter_context(health_files.HealthBeat(files))))
        if grace_seconds is not None:
            hooks.append(on_clusters.Grace(grace_seconds))
    return hooks


def begin_launch(command: CommandLine) -> "LaunchedConfig":
    """Starts measuring a launch, and returns the checked config of the command's experiment.

    Raises:
      ConfigError: Raised by `experiment_of`.
    """
    events.launched(command.began)
    launched = experiment_of(command, trains=True)
    events.begins(INIT)
    return launched


def train_from_command(
    command: CommandLine,
    launched: "LaunchedConfig",
    tools: "JobTools",
    *,
    hooks: "Sequence[Hook]" = (),
    trackers: "Mapping[str, Tracker] | None" = None,
    stop_request: type[StopRequest] = StopRequest,
) -> "tuple[JobOnMesh, TrainingResult]":
    """Trains the experiment of a command line.

    Args:
      command: The common options.
      launched: The result of `begin_launch`.
      tools: Extensions of the training job.
      hooks: Hooks to add after the experiment's hooks.
      trackers: Trackers to add to the experiment's trackers.
      stop_request: Class that handles signals and the time limit.

    Returns:
      The job, and how training ended.

    Raises:
      ConfigError: Raised by `launch_training`.
      LastStepUnsound: Training has ended and was saved, but the final weights should not be used.
    """
    with job_on_mesh(command, launched, "train", on_devices=tools.on_devices) as job:
        mesh = job.partitioner.mesh
        events.report(mesh=dict(mesh.shape), num_devices=mesh.size)
        with events.phase(IMPORT):
            # Import Orbax after the checks, so that failed checks are reported sooner.
            from praxis_lite.trainer.launch import launch_training

        if hooks or trackers:
            all_trackers = {**job.run.trackers, **(trackers or {})}
            run = dataclasses.replace(job.run, trackers=all_trackers)
            extended = dataclasses.replace(job.job, run=run, hooks=(*job.hooks, *hooks))
            job = dataclasses.replace(job, job=extended)
        # JSON lines take the place of the live line.
        is_shown = not command.quiet and command.log_format is LogFormat.TEXT
        result = launch_training(
            job, launched, tools, stop_request=stop_request, shows_progress=is_shown
        )
    events.report(ended="stopped" if result.stopped_by else "trained")
    if result.unsound is not None:
        raise LastStepUnsound(result.unsound)
    return job, result


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text} is not a port; expected 0 to 65535")
    return int(text)
