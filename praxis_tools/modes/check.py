"""`main.py --mode=check`: compares an experiment on meshes with a single device."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.core.errors import require
from praxis_lite.host.whole_files import write_whole
from praxis_lite.modes.launched import experiment_of
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write

if TYPE_CHECKING:
    from praxis_tools.check.certificate import Certificate
    from praxis_tools.check.meshes import Shape


class Check(Mode):
    """Compares an experiment on meshes with the same on a single device."""

    name = "check"
    summary = "compares an experiment on meshes with itself on one device"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --meshes, --steps, --shrink and --json."""
        options.add_argument(
            "--meshes", metavar="1x4x2,...",
            help="the meshes to check on; default: the experiment's own, each axis alone, all "
            "axes, and one that divides as little as possible",
        )
        options.add_argument(
            "--steps", metavar="N", type=int, default=20,
            help="the steps of training on the experiment's own mesh; default: 20",
        )
        options.add_argument(
            "--shrink", action="store_true",
            help="a smaller model of the same kind, for one device to hold",
        )
        options.add_argument(
            "--json", metavar="FILE", type=file_to_write("certificate.json"),
            help="where to write the certificate as well",
        )

    def run(
        self, command: CommandLine, *, meshes: str | None, steps: int, shrink: bool,
        json: Path | None,
    ) -> int:
        """Checks; returns 1 if anything differs."""
        certificate = checked(
            command, lambda text: print(text, flush=True), meshes=meshes, steps=steps,
            shrink=shrink,
        )
        if json is not None:
            write_whole(json, certificate.json_text().encode())
        print(f"\n{certificate}", flush=True)
        return int(not certificate.certified)


def checked(
    command: CommandLine, print_text: Callable[[str], None], *,
    meshes: "str | Sequence[Shape] | None", steps: int, shrink: bool,
) -> "Certificate":
    """Returns the certificate of the experiment of a command line.

    Args:
      print_text: called with lines on the progress.
      meshes, steps, shrink: as for `check_launched`.

    Raises:
      ConfigError: as training does, or a mesh does not fit.
    """
    require(steps > 0, "--steps", steps, "1 or more")
    launched = experiment_of(command)

    from praxis_tools.check.on_meshes import check_launched

    return check_launched(
        launched, meshes=meshes, steps=steps, shrink=shrink, print_text=print_text
    )
