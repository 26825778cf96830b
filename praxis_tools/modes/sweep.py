"""`praxis sweep`: trains an experiment with different settings and compares the results."""

import argparse
from typing import Any

from praxis_lite.modes.job_from_command import job_log_dir
from praxis_lite.modes.mode import CommandLine, Mode

_SEED = 0


class Sweep(Mode):
    """Trains an experiment once per combination of settings, and ranks the trials."""

    name = "sweep"
    summary = "trains an experiment with many settings and finds the best"
    continues_without_output = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the options for the search, the metric and the processes."""
        options.add_argument(
            "--search",
            metavar="NAME",
            default="grid",
            help="grid: all combinations of the values listed in --set; random or tpe (guided by "
            "previous results): ranges such as 1e-4..1e-2 as well; default: grid",
        )
        options.add_argument(
            "--trials",
            dest="num_trials",
            metavar="N",
            type=int,
            help="number of trials, with random or tpe; default: 20",
        )
        options.add_argument(
            "--parallel",
            metavar="N",
            type=int,
            default=1,
            help="number of trials that run at the same time, only on simulated devices; default: "
            "1",
        )
        options.add_argument(
            "--metric",
            metavar="NAME",
            help="metric that ranks the trials, such as heldout/loss; default: the loss of the "
            "only evaluation dataset, or the training loss",
        )
        options.add_argument(
            "--better",
            metavar="min|max",
            default="min",
            help="whether lower or higher values of the metric are better; default: min",
        )
        options.add_argument(
            "--prune",
            dest="pruner",
            metavar="NAME",
            default="median",
            help="rule that ends bad trials early: median, halving or none; default: median",
        )
        options.add_argument(
            "--seed",
            metavar="N",
            type=int,
            default=_SEED,
            help=f"seed of random and tpe; default: {_SEED}",
        )
        options.add_argument(
            "--topology",
            metavar="CHIP:SHAPE",
            help="topology as in `praxis plan`, such as v5e:2x4; trials that do not fit on it are "
            "skipped",
        )
        options.add_argument(
            "--worker",
            dest="is_worker",
            action="store_true",
            help="run trials together with other processes that have the same command, such as "
            "those of a SLURM array; each trial is run by one of them",
        )
        options.add_argument(
            "--print",
            dest="prints",
            action="store_true",
            help="print the trials' commands for a scheduler instead of running them",
        )

    def run(self, command: CommandLine, **options: Any) -> int | None:
        """Runs the trials or prints their commands; raises ConfigError if an option is invalid."""
        directory = job_log_dir(command)

        from praxis_tools.sweep.command import sweep

        return sweep(command, directory, **options)
