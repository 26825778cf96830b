"""`praxis checkpoints`: inspects checkpoints without their model's code.

The exit status is 1 if a step is damaged (verify) or steps differ (diff), 2 after an error, and 0
otherwise.
"""

import argparse
from collections.abc import Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.command import Parser
from praxis_lite.programs.program import Program


class Checkpoints(Program):
    """Inspects the checkpoints of a job, without needing its code or an accelerator."""

    name = "checkpoints"
    summary = "lists, verifies and compares the checkpoints of a job; writes nothing"

    def add_arguments(self, parser: Parser) -> None:
        """Adds the subcommands ls, show, verify, diff and digest."""
        commands = parser.add_subparsers(required=True, metavar="COMMAND")
        for name, command, description in (
            ("ls", _ls, "list the state, size, time and metrics of each step; compare digests"),
            ("show", _show, "show the arrays and the origin of a step"),
            ("verify", _verify, "decode all arrays of one or all steps; exit 1 if one is damaged"),
            ("diff", _diff, "compare two steps of one or two jobs; exit 1 if they differ"),
            ("digest", _digest, "print a digest of the values, which does not depend on the mesh"),
        ):
            subparser = commands.add_parser(
                name, help=description, description=description, allow_abbrev=False
            )
            subparser.set_defaults(command=command)
            add = subparser.add_argument
            add("job_log_dir", metavar="JOB", help="job directory, or its checkpoints folder")
            if name == "diff":
                add("other", nargs="?", metavar="OTHER", help="second job; default: JOB")
                add("--other_step", type=_step, help="step of OTHER; default: the latest")
            step_help = {
                "ls": "step to list; default: all",
                "verify": "step to verify; default: all",
                "diff": "step of JOB; default: the latest, or second latest without OTHER",
            }
            add("--step", type=_step, help=step_help.get(name, "step; default: the latest"))
            if name == "digest":
                add("--leaves", action="store_true", help="also print the digest of each array")

    def run(self, args: argparse.Namespace) -> int:
        """Runs a subcommand; raises ConfigError if the directory has no checkpoints."""
        from praxis_lite.checkpoints import tools

        options = vars(args)
        command, job_log_dir = options.pop("command"), options.pop("job_log_dir")
        return command(tools.steps_directory(job_log_dir), **options)


def _ls(directory: AnyPath, *, step: int | None) -> int:
    from praxis_lite.checkpoints import tools

    steps = tools.list_steps(directory)
    if step is not None:
        steps = [listed for listed in steps if listed.name.partition(".")[0] == str(step)]
    _print(tools.listing(steps))
    return 0


def _show(directory: AnyPath, *, step: int | None) -> int:
    from praxis_lite.checkpoints import tools

    step_dir = tools.step_dir_of(directory, step)
    _print([str(step_dir), *tools.description(step_dir)])
    return 0


def _verify(directory: AnyPath, *, step: int | None) -> int:
    from praxis_lite.checkpoints import tools
    from praxis_lite.checkpoints.steps.step_store import steps_in

    steps = steps_in(directory).numbered() if step is None else [step]
    if step is not None and not (directory / str(step)).is_dir():
        tools.step_dir_of(directory, step)  # Raises an error that lists the existing steps.
    if not steps:
        raise ConfigError(
            f"{directory} has no step to verify, only folders of damaged or unfinished steps. Pass "
            "the directory of a different job."
        )
    status = 0
    for step in steps:
        errors = tools.decoded_step_errors(directory / str(step))
        _print([f"step {step}: {line}" for line in errors or ["good"]])
        status |= bool(errors)
    return int(status)


def _diff(
    directory: AnyPath, *, other: str | None, step: int | None, other_step: int | None
) -> int:
    from praxis_lite.checkpoints import tools
    from praxis_lite.checkpoints.step_differences import step_differences
    from praxis_lite.checkpoints.steps.step_store import steps_in

    other_directory = directory if other is None else tools.steps_directory(other)
    # Within one job, compare with the previous step by default.
    if step is None and other_directory == directory:
        steps = steps_in(directory).committed()
        newer = max(steps, default=0) if other_step is None else other_step
        step = max((earlier for earlier in steps if earlier < newer), default=None)
    first = tools.step_dir_of(directory, step)
    second = tools.step_dir_of(other_directory, other_step)
    if first == second:
        raise ConfigError(
            f"{first} would be compared with itself. Specify a second job, or two steps with "
            "--step and --other_step."
        )
    lines = list(step_differences(first, second))
    if lines:
        _print([f"first:  {first}", f"second: {second}", *lines])
    return int(bool(lines))


def _digest(directory: AnyPath, *, step: int | None, leaves: bool) -> int:
    from praxis_lite.checkpoints import tools
    from praxis_lite.checkpoints.digest import combined, leaf_digests

    step_dir = tools.step_dir_of(directory, step)
    digests = leaf_digests(step_dir)
    if leaves:
        _print([f"{digest}  {path}" for path, digest in digests.items()])
    _print([f"{combined(digests)}  {step_dir}"])
    return 0


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step")
    return int(text)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
