"""`praxis check`: compares results on several meshes with results on one device."""

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from praxis_lite.core.errors import require
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.modes.job_from_command import experiment_of
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write

if TYPE_CHECKING:
    from praxis_tools.check.certificate import Certificate
    from praxis_tools.check.meshes import Shape


class Check(Mode):
    """Checks that an experiment's results are the same on several meshes and on one device."""

    name = "check"
    summary = "compares an experiment's results on several meshes with those on one device"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --meshes, --steps, --shrink and --json."""
        options.add_argument(
            "--meshes",
            metavar="1x4x2,...",
            help="the meshes to check; default: the experiment's mesh, each axis alone, all axes, "
            "and a mesh with as many uneven splits as possible",
        )
        options.add_argument(
            "--steps",
            metavar="N",
            type=int,
            default=20,
            help="number of training steps on the experiment's mesh; default: 20",
        )
        options.add_argument(
            "--shrink",
            action="store_true",
            help="check a smaller model of the same architecture that fits on one device",
        )
        options.add_argument(
            "--json",
            metavar="FILE",
            type=file_to_write("certificate.json"),
            help="write the certificate to this file",
        )

    def run(
        self,
        command: CommandLine,
        *,
        meshes: str | None,
        steps: int,
        shrink: bool,
        json: AnyPath | None,
    ) -> int:
        """Prints the certificate; returns 1 if any results differ, otherwise 0."""
        certificate = check_experiment(
            command,
            _log.info,
            meshes=meshes,
            steps=steps,
            shrink=shrink,
        )
        if json is not None:
            write_atomically(json, certificate.json_text().encode())
        print(f"\n{certificate}", flush=True)
        return int(not certificate.certified)


def check_experiment(
    command: CommandLine,
    print_text: Callable[[str], None],
    *,
    meshes: "str | Sequence[Shape] | None",
    steps: int,
    shrink: bool,
) -> "Certificate":
    """Compares an experiment's results on several meshes with its results on one device.

    Args:
      command: The parsed command line, which names the experiment.
      print_text: Function called with each line of progress.
      meshes: Mesh shapes to check, or None for the default shapes; see `check_launched`.
      steps: Number of training steps on the experiment's mesh.
      shrink: Whether to check a smaller model of the same architecture.

    Raises:
      ConfigError: The experiment is invalid, or a mesh does not fit.
    """
    require(steps > 0, "--steps", steps, "1 or more")
    launched = experiment_of(command)

    from praxis_tools.check.on_meshes import check_launched

    return check_launched(
        launched, meshes=meshes, steps=steps, shrink=shrink, print_text=print_text
    )


_log = logging.getLogger(__name__)
