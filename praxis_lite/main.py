"""From a command line to its mode: the table of all modes, of the run and of the tools."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from praxis_lite.core.errors import require
from praxis_lite.experiment import registry
from praxis_lite.host.whole_files import TRAINING_CONTINUES, launched_again
from praxis_lite.job import processes
from praxis_lite.job.command import run
from praxis_lite.job.events import process_start
from praxis_lite.job.processes.standard_output import print_log
from praxis_lite.job.processes.start import start
from praxis_lite.modes.decode import Decode
from praxis_lite.modes.evaluate import Evaluate
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import parsed
from praxis_lite.modes.summary import Summary
from praxis_lite.modes.train import Train
from praxis_tools.goodput.goodput import time_section
from praxis_tools.modes.certify import Certify
from praxis_tools.modes.check import Check
from praxis_tools.modes.elastic import begin_elastic
from praxis_tools.modes.explain import Explain
from praxis_tools.modes.plan import Plan
from praxis_tools.modes.profile import Profile
from praxis_tools.modes.report import Report
from praxis_tools.modes.sweep import Sweep
from praxis_tools.serve.mode import Serve
from praxis_tools.stuck.beats import StuckBeats
from praxis_tools.tools_of_jobs import TOOLS

MODES: Mapping[str, Mode] = {
    mode.name: mode for mode in (
        Train(TOOLS), Evaluate(), Decode(), Explain(), Plan(), Check(), Sweep(),
        Summary(time_section), Profile(), Report(), Certify(), Serve(),
    )
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits 2, with a paragraph, for errors that the user can mend.

    It exits 3 if training has ended, and is saved, but its last step was skipped, and 1 if
    --mode=check found a difference.
    """
    command, mode = CommandLine(), None

    def launch() -> int | None:
        nonlocal command, mode
        began = process_start()
        command, mode, options = parsed(argv, MODES)
        command.began = began
        print_log()
        if command.list:
            _list_experiments(command.packages)
            return None
        if command.elastic:
            status = begin_elastic(command, argv, options["health_dir"])
            if status is not None:
                return status
        else:
            start(
                command.coordinator, command.num_processes, command.process_id,
                command.start_seconds, command.job_log_dir, StuckBeats,
            )
        require(
            mode.is_of_many_processes or processes.count() == 1,
            f"The number of processes of --mode={command.mode}", processes.count(), "1",
            "Start it once, without --coordinator.",
        )
        with launched_again(then()):
            return mode.run(command, **options)

    def then() -> str:
        return TRAINING_CONTINUES if mode is not None and command.mode == "train" else ""

    def traceback_txt() -> Path | None:
        is_open = command.job_dir is not None and processes.is_first()
        return command.job_dir.traceback_txt if is_open else None

    run(
        launch,
        goes_on=lambda: mode is not None and mode.goes_on and not command.list,
        traceback_txt=traceback_txt,
        wraps=True,
        then=then,
    )


def _list_experiments(packages: Sequence[str]) -> None:
    listed = registry.list_experiments(packages)
    width = max(map(len, listed), default=0)
    for name, summary in listed.items():
        print(f"{name:<{width}}  {summary}")


if __name__ == "__main__":
    main()
