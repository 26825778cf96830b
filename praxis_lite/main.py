"""The command `praxis`: runs a mode on an experiment or a job, or a program on files.

`main.py --mode=MODE --exp=EXP` is the same as `praxis MODE EXP`. Modes and programs are part of the
library or come from installed packages.
"""

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import praxis_lite
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.installed_tools import installed_job_tools
from praxis_lite.job import processes
from praxis_lite.job.command import run
from praxis_lite.job.events import process_start
from praxis_lite.job.processes.logs import configure_log
from praxis_lite.job.processes.start import start
from praxis_lite.modes.decode import Decode
from praxis_lite.modes.evaluate import Evaluate
from praxis_lite.modes.list_experiments import List
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import parse_command_line
from praxis_lite.modes.pax import Pax
from praxis_lite.modes.summary import Summary
from praxis_lite.modes.train import Train
from praxis_lite.programs.checkpoints import Checkpoints
from praxis_lite.programs.completion import Completion
from praxis_lite.programs.huggingface import HuggingFace
from praxis_lite.programs.inputs import Inputs
from praxis_lite.programs.program import Program
from praxis_lite.programs.tokenizers import Tokenizers

TOOLS = installed_job_tools()


def _modes() -> dict[str, Mode]:
    """Returns all modes, keyed by name; packages add modes as entry points `praxis_lite.modes`."""
    installed = importlib.metadata.entry_points(group="praxis_lite.modes")
    modes = [Train(TOOLS), Evaluate(), Decode(), Summary(TOOLS.summary_section), List(), Pax()]
    return {mode.name: mode for mode in (*modes, *(point.load()() for point in installed))}


def _programs() -> dict[str, Program]:
    """Returns all programs, keyed by name; packages add them as `praxis_lite.programs`."""
    installed = importlib.metadata.entry_points(group="praxis_lite.programs")
    own = [Checkpoints(), HuggingFace(), Inputs(), Tokenizers()]
    programs: dict[str, Program] = {
        program.name: program for program in (*own, *(point.load()() for point in installed))
    }
    programs["completion"] = Completion(MODES, programs)
    return programs


MODES = _modes()
PROGRAMS = _programs()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line and exits with a status.

    The status is 2 after an error that the user can fix, 3 if training has ended but its final
    weights should not be used, and 1 if a comparison, such as `praxis check`, found a difference.

    Args:
      argv: The arguments, or None for `sys.argv[1:]`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = CommandLine()
    selected: Mode | Program | None = None

    def launch() -> int | None:
        nonlocal command, selected
        began = process_start()
        first = arguments[0] if arguments else "--help"
        if first in ("-h", "--help"):
            print(_help())
            return None
        if first == "--version":
            print(f"praxis_lite {praxis_lite.__version__}")
            return None
        if first in PROGRAMS:
            selected = program = PROGRAMS[first]
            return program.run(program.parse(arguments[1:]))
        command, mode, options = parse_command_line(arguments, MODES, PROGRAMS)
        selected, command.began = mode, began
        configure_log(verbose=command.verbose, quiet=command.quiet, log_format=command.log_format)
        status = _join_processes(command, arguments, options)
        if status is not None:
            return status
        require(
            mode.is_of_many_processes or processes.count() == 1,
            f"The number of processes of `praxis {command.mode}`",
            processes.count(),
            "1",
            "Start one process, without --coordinator.",
        )
        return mode.run(command, **options)

    def traceback_txt() -> Path | None:
        job_dir = command.job_dir if processes.is_first() else None
        # The local copy of a job in an object store is deleted at exit.
        if job_dir is None or job_dir.location != job_dir.path:
            return None
        return job_dir.traceback_txt

    def continues_without_output() -> bool:
        return selected is not None and selected.continues_without_output

    program = PROGRAMS.get(arguments[0]) if arguments else None
    run(
        launch,
        continues_without_output=continues_without_output,
        traceback_txt=traceback_txt,
        logs_to_stderr=program is not None and program.logs_to_stderr,
    )


def _join_processes(
    command: CommandLine, arguments: Sequence[str], options: Mapping[str, Any]
) -> int | None:
    """Connects this process to the other processes of the job, or supervises an elastic job.

    Returns:
      The exit status of a supervisor, or None in a process that runs the mode.
    """
    if command.elastic:
        if TOOLS.begin_elastic is None:
            raise ConfigError(
                "--elastic requires praxis_tools, which contains the supervisor of elastic jobs. "
                "Install praxis_tools."
            )
        return TOOLS.begin_elastic(command, arguments, options["health_dir"])
    start(
        command.coordinator,
        command.num_processes,
        command.process_id,
        command.start_seconds,
        command.job_log_dir,
        TOOLS.beats,
    )
    return None


def _help() -> str:
    """Returns the text of `praxis --help`, with a line for each subcommand."""
    lines = [
        "usage: praxis COMMAND [EXP | JOB] [options]",
        "       praxis COMMAND --help",
        "       praxis --version",
        "",
        "Trains, evaluates and decodes experiments on any mesh. EXP is the name of an experiment,",
        "such as lm.PyDocs, and JOB is the directory of a job.",
    ]
    for title, commands in (
        ("experiments and jobs:", MODES),
        ("files:", PROGRAMS),
    ):
        lines += ["", title, *(f"  {name:12} {item.summary}" for name, item in commands.items())]
    lines += [
        "",
        "In a checkout, `python main.py --mode=COMMAND --exp=EXP --job_log_dir=JOB [options]` is",
        "equivalent for experiments and jobs. The default of --mode is train.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":  # `python -m praxis_lite.main` works like `python -m praxis_lite`.
    main()
