"""`main.py --mode=sweep`: many jobs of an experiment, with different settings."""

import argparse

from praxis_lite.modes.launched import job_log_dir
from praxis_lite.modes.mode import CommandLine, Mode

_SEED = 0


class Sweep(Mode):
    """Trains an experiment with each of several settings, and compares the results."""

    name = "sweep"
    summary = "trains an experiment with many settings, and finds the best"
    goes_on = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds those of the search, of the metric, and of the processes."""
        options.add_argument(
            "--search", metavar="NAME", default="grid",
            help="grid: each combination of the values that --set lists; random, or tpe (by the "
            "results so far): also from ranges, 1e-4..1e-2; default: grid",
        )
        options.add_argument(
            "--trials", metavar="N", type=int, help="with random or tpe: how many; default: 20"
        )
        options.add_argument(
            "--parallel", metavar="N", type=int, default=1,
            help="how many trials run at a time, on simulated devices alone; default: 1",
        )
        options.add_argument(
            "--metric", metavar="NAME",
            help="the metric to compare, such as heldout/loss; default: the loss of the only "
            "evaluation dataset, or of training (loss)",
        )
        options.add_argument(
            "--better", metavar="min|max", default="min",
            help="which values of it are better; default: min",
        )
        options.add_argument(
            "--prune", metavar="NAME", default="median",
            help="how the worst trials are ended early: median, halving or none; default: median",
        )
        options.add_argument(
            "--seed", metavar="N", type=int, default=_SEED,
            help=f"of random and tpe; default: {_SEED}",
        )
        options.add_argument(
            "--topology", metavar="CHIP:SHAPE",
            help="devices, as for --mode=plan, such as v5e:2x4: a trial that does not fit on them "
            "by its plan is not begun",
        )
        options.add_argument(
            "--print", dest="prints", action="store_true",
            help="print the trials' commands for a scheduler instead of running them",
        )

    def run(
        self, command: CommandLine, *, search: str, trials: int | None, parallel: int,
        metric: str | None, better: str, prune: str, seed: int, topology: str | None,
        prints: bool,
    ) -> int | None:
        """Sweeps; raises ConfigError as `sweep` does."""
        directory = job_log_dir(command)

        from praxis_tools.sweep.command import sweep

        return sweep(
            command, directory, parallel=parallel, prints=prints, num_trials=trials, metric=metric,
            search=search, better=better, pruner=prune, seed=seed, topology=topology,
        )
