"""Parses the command line, which consists of common options and the options of a mode."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.callables import imported_module
from praxis_lite.core.errors import ConfigError, did_you_mean, require_choice
from praxis_lite.experiment.registry import allowed_packages
from praxis_lite.job.command import Parser
from praxis_lite.job.processes.logs import LogFormat
from praxis_lite.modes.mode import CommandLine, Mode

__all__ = ("file_to_write", "names")

# Options and modes of Pax, and their equivalents in praxis_lite.
PAX_OPTIONS = {
    "fdl_config": "--exp=NAME with --set path=value",
    "fdl_flags_override": "--set path=value",
    "tfds_data_dir": "the path of a Tfds source",
    "eval_on_test": "a dataset of that name",
    "job_log_dir_override": "--job_log_dir=DIR",
    "restore_checkpoint_step": "--step=N",
    "exit_after_ondemand_checkpoint": "nothing: SIGTERM saves and ends",
}
PAX_MODES = {
    "decode_once": "decode",
    "decode_batches": "decode",
    "eval_once": "eval",
    "infer": "decode",
}

Modes = Mapping[str, Mode]


def parse_command_line(
    argv: Sequence[str] | None, modes: Modes
) -> tuple[CommandLine, Mode, dict[str, Any]]:
    """Parses a command line.

    Args:
      argv: The arguments, or None for the arguments of this process.
      modes: The known modes, keyed by name. --packages may provide additional modes.

    Returns:
      A tuple of the common options, the mode, and the values of the mode's options, keyed by name.

    Raises:
      ConfigError: An option is unknown, is not used by the mode, or has an invalid value.
    """
    first = Parser(add_help=False)
    _add_common(first, modes)
    given = first.parse_known_args(argv)[0]
    name = given.mode or CommandLine.mode
    mode = modes[name] if name in modes else _custom_mode(name, given.packages, modes)
    parser = parser_of(name, mode, modes)
    if given.mode is None:
        parser.epilog = "\n".join(_help_section(name, mode) for name, mode in modes.items())
    values = vars(parser.parse_args(argv)) | {"mode": name}
    common = [field.name for field in dataclasses.fields(CommandLine) if field.name in values]
    return CommandLine(**{name: values.pop(name) for name in common}), mode, values


def parser_of(name: str, mode: Mode, modes: Modes) -> Parser:
    """Returns the parser for command lines with this mode."""
    parser = Parser(
        prog="main.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Trains, evaluates, decodes, explains, plans or checks an experiment.",
    )
    parser.pax_options = PAX_OPTIONS
    _add_common(parser, modes)
    flags = _flags(mode)
    if flags:
        mode.add_options(parser.add_argument_group(f"--mode={name}", mode.summary))
    modes_by_flag: dict[str, list[str]] = {}
    for other_name, other_mode in modes.items():
        for flag in _flags(other_mode):
            modes_by_flag.setdefault(flag, []).append(f"--mode={other_name}")
    for flag, mode_names in modes_by_flag.items():
        if flag not in flags:
            *first, last = mode_names
            modes_text = f"{', '.join(first)} and {last}" if first else last
            parser.add_argument(
                flag,
                action=_OtherModeOption,
                help=argparse.SUPPRESS,
                nargs="*",
                default=argparse.SUPPRESS,
                const=f"is an option of {modes_text}; --mode={name}",
            )
    return parser


def names(words: str) -> list[str]:
    """Splits the value "a,b" of an option into names."""
    return [word.strip() for word in words.split(",")]


def file_to_write(example: str) -> Callable[[str], Path]:
    """Returns an argparse type for an option that specifies a file to write."""

    def parse_path(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or not path.name:
            raise argparse.ArgumentTypeError(
                f"{text} is a directory; expected a file, such as {path / example}"
            )
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"{text} cannot be written: there is no directory {path.parent}. Create it"
            )
        return path

    return parse_path


def _add_common(parser: Parser, modes: Modes) -> None:
    parser.add_argument(
        "--exp", metavar="NAME", help="the experiment, such as lm.PyDocs or mypackage.mod.MyLm"
    )
    parser.add_argument(
        "--packages",
        metavar="NAME,...",
        type=names,
        action="extend",
        default=[],
        help="your packages, in which --exp is looked up in addition to praxis_lite.experiments",
    )
    parser.add_argument("--job_log_dir", metavar="DIR", help="directory of the job's files")
    parser.add_argument(
        "--mode",
        metavar="MODE",
        type=_mode,
        help=f"{', '.join(modes)}, or module.Class of your package; default: {CommandLine.mode}",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="path=value",
        nargs="+",
        action="extend",
        default=[],
        help="set any field of the config, for instance run.num_train_steps=200, or an attribute "
        "of the experiment's class",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="for a job of several processes: address of the first process. This flag and the "
        "next two are not needed under SLURM, Open MPI and Kubernetes, and on TPU slices",
    )
    parser.add_argument("--num_processes", metavar="N", type=int, help="number of processes")
    parser.add_argument("--process_id", metavar="K", type=int, help="index of this process, from 0")
    parser.add_argument(
        "--start_seconds",
        metavar="S",
        type=int,
        default=CommandLine.start_seconds,
        help="how long processes wait for each other at the start; default: "
        f"{CommandLine.start_seconds}",
    )
    parser.add_argument("--list", action="store_true", help="list the experiments and exit")
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument(
        "-v", "--verbose", action="store_true", help="log more, such as the times of phases"
    )
    verbosity.add_argument(
        "-q", "--quiet", action="store_true", help="log only warnings and errors to the output"
    )
    parser.add_argument(
        "--log_format",
        metavar="FORMAT",
        type=_log_format,
        default=LogFormat.TEXT,
        help="text (default), or json for one JSON object per line of the log",
    )


def _mode(text: str) -> str:
    if text in PAX_MODES:
        raise argparse.ArgumentTypeError(
            f"{text} is a mode of Pax; in praxis_lite it is {PAX_MODES[text]}: see "
            "docs/coming_from_pax.md"
        )
    return text


def _log_format(text: str) -> LogFormat:
    try:
        return LogFormat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a format; expected text or json") from None


def _custom_mode(name: str, packages: Sequence[str], modes: Modes) -> Mode:
    """Returns the mode `module.Class` from a package in --packages."""
    module, _, class_name = name.rpartition(".")
    top = module.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")) or not module:
        require_choice("--mode", name, modes)
    allowed_packages(packages)
    if top not in packages:
        raise ConfigError(
            f"--mode={name} is in the package {top}, which is not in --packages: add "
            f"--packages={top}."
        )
    members = vars(imported_module(module) or object)
    mode_class = members.get(class_name)
    if not (isinstance(mode_class, type) and issubclass(mode_class, Mode)):
        raise ConfigError(
            f"--mode={name} is {mode_class!r}; expected a subclass of praxis_lite.modes.Mode."
            f"{did_you_mean(class_name, members)}"
        )
    return mode_class()


def _flags(mode: Mode) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    mode.add_options(parser.add_argument_group())
    return [action.option_strings[0] for action in parser._actions if action.option_strings]


def _help_section(name: str, mode: Mode) -> str:
    """Returns the --help section about a mode and its options."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    mode.add_options(parser.add_argument_group(f"--mode={name}", mode.summary))
    return parser.format_help()


class _OtherModeOption(argparse.Action):
    """An argparse action that raises an error for an option that belongs to other modes."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        raise ConfigError(
            f"{self.option_strings[0]} {self.const} does not use it. Remove the option."
        )
