"""Parses the command line, which consists of common options and the options of a mode."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from praxis_lite.config.settings_file import SettingInFile, settings_in_file
from praxis_lite.core.callables import imported_module
from praxis_lite.core.errors import ConfigError, did_you_mean, shortened
from praxis_lite.experiment.registry import allowed_packages
from praxis_lite.host.object_stores import AnyPath, StorePath
from praxis_lite.host.places import local_file, output_file
from praxis_lite.job.command import Parser
from praxis_lite.job.processes.logs import LogFormat
from praxis_lite.modes.mode import CommandLine, Mode

__all__ = ("file_to_write", "names")

# Options and modes of Pax, and their equivalents in praxis_lite.
PAX_OPTIONS = {
    "fdl_config": "the name of an experiment, with --set path=value or --config=FILE",
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
    argv: Sequence[str], modes: Modes, other_commands: Collection[str] = ()
) -> tuple[CommandLine, Mode, dict[str, Any]]:
    """Parses `MODE [EXP | JOB] [options]`, or the same with --mode=MODE.

    Args:
      argv: The arguments.
      modes: The known modes, keyed by name. --packages may provide additional modes.
      other_commands: Names of the subcommands that are not modes, for error messages.

    Returns:
      A tuple of the common options, the mode, and the values of the mode's options, keyed by name.

    Raises:
      ConfigError: An option is unknown, is not used by the mode, or has an invalid value.
    """
    first = Parser(add_help=False)
    first.add_argument("--mode")
    first.add_argument("--exp")
    add_packages(first)
    given = first.parse_known_args(argv)[0]
    known = [*modes, *other_commands]
    name, options = given.mode or CommandLine.mode, argv
    if argv and not argv[0].startswith("-"):
        name, *options = argv
        if given.mode is not None:
            raise ConfigError(
                f"--mode={given.mode} cannot be combined with `praxis {name}`. Remove one of them."
            )
    elif given.mode is None and given.exp is None:
        for argument in argv:
            if argument in known:
                raise ConfigError(
                    f"The command must come first: `praxis {argument} {argv[0]} ...` instead of "
                    f"`praxis {argv[0]} {argument} ...`."
                )
    mode = modes[name] if name in modes else _custom_mode(name, given.packages, known)
    values = vars(parser_of(name, mode, modes).parse_args(options)) | {"mode": name}
    _set_argument(values, name, mode)
    common = [field.name for field in dataclasses.fields(CommandLine) if field.name in values]
    return CommandLine(**{name: values.pop(name) for name in common}), mode, values


def parser_of(name: str, mode: Mode, modes: Modes) -> Parser:
    """Returns the parser for command lines with this mode."""
    parser = Parser(
        prog=f"praxis {name}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{mode.summary[0].upper()}{mode.summary[1:]}.",
        epilog=f"`python main.py --mode={name}` takes the same options.",
    )
    parser.pax_options = PAX_OPTIONS
    _add_common(parser, mode)
    group = parser.add_argument_group(f"options of {name}")
    mode.add_options(group)
    flags = _flags(mode)
    modes_by_flag: dict[str, list[str]] = {}
    for other_name, other_mode in modes.items():
        for flag in _flags(other_mode):
            modes_by_flag.setdefault(flag, []).append(other_name)
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
                const=f"is an option of {modes_text}; {name}",
            )
    parser.usage = " ".join(["praxis", name, *_arguments(parser), "[options]"])
    return parser


def add_packages(parser: argparse.ArgumentParser) -> None:
    """Adds the option --packages."""
    parser.add_argument(
        "--packages",
        metavar="NAME,...",
        type=names,
        action="extend",
        default=[],
        help="your packages, in which experiments are looked up in addition to "
        "praxis_lite.experiments",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the options --set and --config."""
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
        "--config",
        metavar="FILE",
        action=_ReadSettings,
        default=argparse.SUPPRESS,
        help="settings in a file: lines `path=value`, as in a job's config.txt, or YAML in "
        "FILE.yaml; --set overrides them",
    )


def names(words: str) -> list[str]:
    """Splits the value "a,b" of an option into names."""
    return [word.strip() for word in words.split(",")]


def file_to_write(example: str) -> Callable[[str], AnyPath]:
    """Returns an argparse type for an option that specifies a file to write.

    Args:
      example: Name of such a file, for error messages.
    """

    def parse_path(text: str) -> AnyPath:
        try:
            path = output_file(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
        if isinstance(path, StorePath):
            return path
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


_ARGUMENTS = {
    "exp": ("EXP", "the experiment, such as lm.PyDocs or mypackage.mod.MyLm"),
    "job_log_dir": ("JOB", "directory of the job's files"),
}


def _add_common(parser: Parser, mode: Mode) -> None:
    if mode.argument is not None:
        metavar, text = _ARGUMENTS[mode.argument]
        parser.add_argument("argument", metavar=metavar, nargs="?", help=text)
    for option, (_, text) in _ARGUMENTS.items():
        # `praxis --help` documents the options of main.py that the argument replaces.
        text = argparse.SUPPRESS if option == mode.argument else text
        parser.add_argument(f"--{option}", metavar="DIR" if "dir" in option else "NAME", help=text)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    add_packages(parser)
    add_settings(parser)
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


def _log_format(text: str) -> LogFormat:
    try:
        return LogFormat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a format; expected text or json") from None


def _set_argument(values: dict[str, Any], name: str, mode: Mode) -> None:
    """Moves the argument EXP or JOB to the option that it sets."""
    given = values.pop("argument", None)
    if given is None or mode.argument is None:
        return
    if values[mode.argument] is not None:
        metavar, _ = _ARGUMENTS[mode.argument]
        raise ConfigError(
            f"`praxis {name} {metavar}` and --{mode.argument} are the same, but both "
            f"{given} and --{mode.argument}={values[mode.argument]} are given. Remove one of them."
        )
    values[mode.argument] = given


def _arguments(parser: Parser) -> list[str]:
    """Returns a parser's positional arguments, formatted as in its usage line."""
    forms = {"?": "[{}]", "*": "[{} ...]"}
    return [
        forms.get(str(action.nargs), "{}").format(action.metavar)
        for action in parser._get_positional_actions()
    ]


class _ReadSettings(argparse.Action):
    """An argparse action that inserts the settings of a file before those of --set."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        settings = [*namespace.settings]
        position = sum(isinstance(setting, SettingInFile) for setting in settings)
        settings[position:position] = settings_in_file(local_file(values))
        namespace.settings = settings


def _custom_mode(name: str, packages: Sequence[str], known: Sequence[str]) -> Mode:
    """Returns the mode `module.Class` from a package in --packages."""
    if name in PAX_MODES:
        raise ConfigError(
            f"{name} is a mode of Pax; in praxis_lite it is {PAX_MODES[name]}: see "
            "docs/coming_from_pax.md."
        )
    if "=" in name:
        raise ConfigError(
            f"{shortened(name)} is not a subcommand. For a setting, write --set {shortened(name)}."
        )
    module, _, class_name = name.rpartition(".")
    top = module.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")) or not module:
        raise ConfigError(
            f"There is no subcommand {shortened(name)}."
            f"{did_you_mean(name, known)} `praxis --help` lists all."
        )
    if top not in packages:
        raise ConfigError(
            f"There is no subcommand {shortened(name)}; expected a name such as train, as in "
            f"`praxis train lm.PyDocs`. If it is a mode of your package, add --packages={top}."
        )
    allowed_packages(packages)
    members = vars(imported_module(module) or object)
    mode_class = members.get(class_name)
    if not (isinstance(mode_class, type) and issubclass(mode_class, Mode)):
        raise ConfigError(
            f"The mode {name} is {mode_class!r}; expected a subclass of praxis_lite.modes.Mode."
            f"{did_you_mean(class_name, members)}"
        )
    return mode_class()


def _flags(mode: Mode) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    mode.add_options(parser.add_argument_group())
    return [action.option_strings[0] for action in parser._actions if action.option_strings]


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
