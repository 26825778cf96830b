"""Parses the command line and runs the selected mode.

Modes are part of the library or come from installed packages.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.experiment import registry
from praxis_lite.installed_tools import installed_job_tools
from praxis_lite.job import processes
from praxis_lite.job.command import run
from praxis_lite.job.events import process_start
from praxis_lite.job.processes.logs import configure_log
from praxis_lite.job.processes.start import start
from praxis_lite.modes.decode import Decode
from praxis_lite.modes.evaluate import Evaluate
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import parse_command_line
from praxis_lite.modes.summary import Summary
from praxis_lite.modes.train import Train

TOOLS = installed_job_tools()


def _modes() -> dict[str, Mode]:
    """Returns all modes, keyed by name; packages add modes as entry points `praxis_lite.modes`."""
    installed = importlib.metadata.entry_points(group="praxis_lite.modes")
    modes = [Train(TOOLS), Evaluate(), Decode(), Summary(TOOLS.summary_section)]
    return {mode.name: mode for mode in (*modes, *(point.load()() for point in installed))}


MODES: Mapping[str, Mode] = _modes()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line and exits with a status.

    The status is 2 after an error that the user can fix, 3 if training has ended but its final
    weights should not be used, and 1 if --mode=check found a difference.

    Args:
      argv: The arguments, or None for `sys.argv[1:]`.
    """
    command, mode = CommandLine(), None

    def launch() -> int | None:
        nonlocal command, mode
        began = process_start()
        command, mode, options = parse_command_line(argv, MODES)
        command.began = began
        configure_log(verbose=command.verbose, quiet=command.quiet, log_format=command.log_format)
        if command.list:
            _list_experiments(command.packages)
            return None
        if command.elastic:
            if TOOLS.begin_elastic is None:
                raise ConfigError(
                    "--elastic requires praxis_tools, which contains the supervisor of elastic "
                    "jobs. Install praxis_tools."
                )
            status = TOOLS.begin_elastic(command, argv, options["health_dir"])
            if status is not None:
                return status
        else:
            start(
                command.coordinator,
                command.num_processes,
                command.process_id,
                command.start_seconds,
                command.job_log_dir,
                TOOLS.beats,
            )
        require(
            mode.is_of_many_processes or processes.count() == 1,
            f"The number of processes of --mode={command.mode}",
            processes.count(),
            "1",
            "Start one process, without --coordinator.",
        )
        return mode.run(command, **options)

    def traceback_txt() -> Path | None:
        job_dir = command.job_dir if processes.is_first() else None
        return None if job_dir is None else job_dir.traceback_txt

    def continues_without_output() -> bool:
        return mode is not None and mode.continues_without_output and not command.list

    run(
        launch,
        continues_without_output=continues_without_output,
        traceback_txt=traceback_txt,
        wraps=True,
    )


def _list_experiments(packages: Sequence[str]) -> None:
    listed = registry.list_experiments(packages)
    width = max(map(len, listed), default=0)
    for name, summary in listed.items():
        print(f"{name:<{width}}  {summary}")


if __name__ == "__main__":
    main()
