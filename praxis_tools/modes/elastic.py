"""`--elastic`: runs this process as the supervisor of a host, or as the supervisor's worker."""

import logging
import os
import time
from collections.abc import Sequence

from praxis_lite.core.errors import require
from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.health_files import HealthFiles, health_directory
from praxis_lite.job.job_dir import open_for_supervisors
from praxis_lite.job.processes.addresses import own_address
from praxis_lite.job.processes.logs import set_supervised_process
from praxis_lite.job.processes.start import connect_member, process_numbers
from praxis_lite.modes.job_from_command import experiment_name, job_log_dir
from praxis_lite.modes.mode import CommandLine
from praxis_tools.elastic import worker_assignment
from praxis_tools.stuck.progress import progress_recorder


def begin_elastic(command: CommandLine, argv: Sequence[str], health_dir: str | None) -> int | None:
    """Runs this host's supervisor, or prepares this process as a worker.

    Args:
      command: The parsed command line.
      argv: Command-line arguments.
      health_dir: Value of --health_dir.

    Returns:
      The exit status in a supervisor, or None in a worker, once the worker has received an
      assignment.

    Raises:
      ConfigError: A flag is invalid or missing, or the directory does not belong to a job.
    """
    if not worker_assignment.is_worker():
        return _supervise(command, argv, health_dir)
    assignment = worker_assignment.wait_for_assignment(lambda: _import(command))
    command.began = time.time()
    events.add_listener(worker_assignment.SupervisorListener())
    events.add_listener(progress_recorder)
    worker_assignment.report_phase("connect")
    connect_member(assignment, command.start_seconds)
    worker_assignment.report_progress()
    if processes.is_first():
        names = ", ".join(map(str, assignment.members))
        _log.info(
            "generation %d: processes %s of %d", assignment.generation, names, assignment.num_slots
        )
    return None


def _supervise(command: CommandLine, argv: Sequence[str], health_dir: str | None) -> int:
    from praxis_tools.elastic.leader import Settings
    from praxis_tools.elastic.supervisor import Supervisor

    member, num_members = process_numbers(
        command.coordinator, command.num_processes, command.process_id, os.environ
    )
    set_supervised_process(member)
    min_members = 1 if command.min_processes is None else command.min_processes
    require(
        1 <= min_members <= num_members,
        "--min_processes",
        min_members,
        f"a number from 1 to {num_members}, the number of processes",
    )
    experiment_name(command)  # Raises an error if there is none.
    job = open_for_supervisors(job_log_dir(command))
    health = None
    if health_dir is not None:
        health = HealthFiles(health_directory(health_dir, command.job_log_dir))
    return Supervisor(
        Settings(
            argv=tuple(argv),
            job=job,
            member=member,
            num_members=num_members,
            min_members=min_members,
            start_seconds=command.start_seconds,
            address=own_address(command.coordinator),
        ),
        health,
    ).run()


def _import(command: CommandLine) -> None:
    """Imports the modules required for training while the worker waits for its assignment."""
    from praxis_lite.experiment.launched_config import config_of_experiment
    from praxis_lite.trainer import launch  # noqa: F401

    assert command.exp is not None  # The supervisor has checked this.
    config_of_experiment(command.exp, command.settings, command.packages)


_log = logging.getLogger(__name__)
