"""`praxis list`: lists the experiments, or the settings of an experiment."""

import argparse

from praxis_lite.experiment.registry import list_experiments
from praxis_lite.modes.mode import CommandLine, Mode


class List(Mode):
    """Prints the names of experiments with their descriptions, or an experiment's config."""

    name = "list"
    summary = "lists the experiments, or all settings of an experiment"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds --names."""
        options.add_argument(
            "--names",
            action="store_true",
            help="print only the names of experiments, or the paths of settings",
        )

    def run(self, command: CommandLine, *, names: bool) -> None:
        """Prints the list. Raises ConfigError if there is no such experiment or setting."""
        if command.exp is None:
            listed = list_experiments(command.packages)
            width = max(map(len, listed), default=0)
            for name, summary in listed.items():
                print(name if names else f"{name:<{width}}  {summary}")
            return

        from praxis_lite.config.config_json import config_lines
        from praxis_lite.experiment.launched_config import config_of_experiment

        launched = config_of_experiment(command.exp, command.settings, command.packages)
        for line in config_lines(launched.config):
            print(line.partition("=")[0] if names else line)
