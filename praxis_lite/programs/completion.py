"""`praxis completion`: prints a script with which a shell completes the command line."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from praxis_lite.host.optional_packages import optional_module
from praxis_lite.job.command import Parser
from praxis_lite.modes.options import parser_of
from praxis_lite.programs.program import Program

if TYPE_CHECKING:
    from praxis_lite.modes.mode import Mode

_DIRECTORIES = ("DIR", "HF_DIR", "JOB", "OUT", "OUT_DIR", "OTHER")
# Functions for bash and zsh. `praxis list --names EXP` creates the experiment's config, which takes
# seconds, so its output is cached for an hour.
_FUNCTIONS = """
_praxis_packages() {
  printf '%s\\n' "$_praxis_line" | grep -o -- '--packages[= ][^ ]*' | tr ' ' '='
}
_praxis_names() {
  praxis list --names $(_praxis_packages) 2>/dev/null
}
_praxis_paths() {
  local target=$(printf '%s\\n' "$_praxis_line" | awk '{print $3}')
  local folder=${XDG_CACHE_HOME:-$HOME/.cache}/praxis_lite/completion
  if [ -f "$target/config.txt" ]; then
    cut -d= -f1 "$target/config.txt"
  elif [ -n "$target" ] && [ "${target#-}" = "$target" ]; then
    if [ -z "$(find "$folder/$target" -mmin -60 -size +0 2>/dev/null)" ]; then
      mkdir -p "$folder"
      praxis list "$target" --names $(_praxis_packages) > "$folder/$target" 2>/dev/null
    fi
    cat "$folder/$target"
  fi
}
"""
_BASH = """
_praxis_experiments() { local _praxis_line=$COMP_LINE; compgen -W "$(_praxis_names)" -- "$1"; }
_praxis_settings() { local _praxis_line=$COMP_LINE; compgen -W "$(_praxis_paths)" -- "$1"; }
"""
_ZSH = """
_praxis_experiments() { local _praxis_line=$BUFFER; compadd -- ${(f)"$(_praxis_names)"}; }
_praxis_settings() { local _praxis_line=$BUFFER; compadd -S = -- ${(f)"$(_praxis_paths)"}; }
"""


class Completion(Program):
    """Prints a completion script for subcommands, options, experiments and settings.

    Args:
      modes: All modes, keyed by name.
      programs: All programs, keyed by name.
    """

    name = "completion"
    summary = "prints a script with which bash or zsh completes commands and settings"

    def __init__(self, modes: "Mapping[str, Mode]", programs: Mapping[str, Program]):
        self._modes, self._programs = modes, programs

    def add_arguments(self, parser: Parser) -> None:
        """Adds the name of the shell."""
        parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")

    def run(self, args: argparse.Namespace) -> None:
        """Prints the script; raises ConfigError if shtab is not installed."""
        shtab = optional_module("shtab", "praxis completion")
        parser = Parser(prog="praxis")
        commands = parser.add_subparsers()
        for name, mode in self._modes.items():
            parents = [parser_of(name, mode, self._modes)]
            commands.add_parser(name, parents=parents, add_help=False, help=mode.summary)
        for name, program in self._programs.items():
            parents = [program.parser()]
            commands.add_parser(name, parents=parents, add_help=False, help=program.summary)
        _set_completions(parser, shtab)
        functions = {"bash": _FUNCTIONS + _BASH, "zsh": _FUNCTIONS + _ZSH}
        print(shtab.complete(parser, args.shell, preamble=functions))


def _set_completions(parser: argparse.ArgumentParser, shtab) -> None:
    """Sets how the values of a parser's arguments are completed, also in its subcommands."""
    for action in parser._actions:
        function = None
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _set_completions(subparser, shtab)
        elif action.metavar == "EXP" or "--exp" in action.option_strings:
            function = dict.fromkeys(("bash", "zsh"), "_praxis_experiments")
        elif "--set" in action.option_strings:
            function = dict.fromkeys(("bash", "zsh"), "_praxis_settings")
        elif action.metavar in _DIRECTORIES:
            function = shtab.DIRECTORY
        elif action.metavar == "FILE":
            function = shtab.FILE
        if function is not None:
            # shtab reads this attribute, which argparse does not have.
            action.complete = function  # type: ignore[attr-defined]
