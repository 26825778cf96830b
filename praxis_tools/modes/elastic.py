"""`--elastic`: this process supervises its host, or is the worker of a supervisor."""

import os
import sys
import time
from collections.abc import Sequence

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.job import processes
from praxis_lite.job.events import events
from praxis_lite.job.health_files import HealthFiles, directory_of
from praxis_lite.job.job_dir import open_for_meeting
from praxis_lite.job.processes.addresses import own_address
from praxis_lite.job.processes.start import connect_member, own_number
from praxis_lite.modes.launched import job_log_dir
from praxis_lite.modes.mode import CommandLine
from praxis_tools.elastic import worker_order
from praxis_tools.stuck.progress import own


def begin_elastic(
    command: CommandLine, argv: Sequence[str] | None, health_dir: str | None
) -> int | None:
    """Returns the status of this host's supervisor; None in a worker, once it has its order.

    Args:
      health_dir: of the option of that name.

    Raises ConfigError if a flag is wrong or missing, or the directory is no job's.
    """
    if not worker_order.is_worker():
        return _supervise(command, sys.argv[1:] if argv is None else argv, health_dir)
    taken = worker_order.wait_for_order(lambda: _import(command))
    command.began = time.time()
    events.add_listener(worker_order.ToSupervisor())
    events.add_listener(own)
    worker_order.tell_phase("connect")
    connect_member(taken, command.start_seconds)
    worker_order.report_progress()
    if processes.is_first():
        names = ", ".join(map(str, taken.members))
        print(
            f"generation {taken.generation}: processes {names} of {taken.num_slots}", flush=True
        )
    return None


def _supervise(command: CommandLine, argv: Sequence[str], health_dir: str | None) -> int:
    from praxis_tools.elastic.leader import Settings
    from praxis_tools.elastic.supervisor import Supervisor

    member, num_members = own_number(
        command.coordinator, command.num_processes, command.process_id, os.environ
    )
    least = 1 if command.min_processes is None else command.min_processes
    require(
        1 <= least <= num_members, "--min_processes", least,
        f"a number from 1 to {num_members}, the number of processes",
    )
    if command.exp is None:
        raise ConfigError("--elastic needs --exp=NAME; --list shows the names there are.")
    job = open_for_meeting(job_log_dir(command))
    health = None
    if health_dir is not None:
        health = HealthFiles(directory_of(health_dir, command.job_log_dir))
    return Supervisor(Settings(
        argv=tuple(argv), job=job, member=member, num_members=num_members, min_members=least,
        start_seconds=command.start_seconds, address=own_address(command.coordinator),
    ), health).run()


def _import(command: CommandLine) -> None:
    """Imports what training needs before an order comes."""
    from praxis_lite.experiment.launched_config import config_of_experiment
    from praxis_lite.trainer import launch  # noqa: F401

    config_of_experiment(command.exp, command.settings, command.packages)
