"""`praxis explain`: prints the layout and the compiled steps of an experiment."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.modes.job_from_command import experiment_of, job_on_mesh
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write

if TYPE_CHECKING:
    from praxis_tools.explain.explain import Explanation


class Explain(Mode):
    """Compiles an experiment's steps and prints the layout, memory and collectives."""

    name = "explain"
    summary = "prints an experiment's layout and its steps' memory and collectives"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --html."""
        options.add_argument(
            "--html",
            metavar="FILE",
            type=file_to_write("explain.html"),
            help="write the explanation as an HTML page",
        )

    def run(self, command: CommandLine, *, html: AnyPath | None) -> None:
        """Prints the explanation; raises ConfigError if the experiment is invalid."""
        explanation = explain_experiment(command, print)
        if html is not None:
            write_atomically(html, explanation.page().encode())
            print(f"\nOpen this page in a browser: {html.absolute()}")


def explain_experiment(command: CommandLine, print_text: Callable[[str], None]) -> "Explanation":
    """Compiles and explains the steps of the experiment specified on the command line.

    Args:
      command: The parsed command line, which names the experiment.
      print_text: Function called with each section of the text as soon as it is known.

    Raises:
      ConfigError: The experiment is invalid.
    """
    launched = experiment_of(command)
    with job_on_mesh(command, launched, "explain") as job:
        from praxis_tools.explain.explain import explain
        from praxis_tools.plan.attached import figures_on_attached_devices

        return explain(
            job.partitioner,
            job.datasets,
            job.decode_datasets,
            print_text,
            experiment=launched.experiment,
            figures_of=figures_on_attached_devices(job.partitioner),
        )
