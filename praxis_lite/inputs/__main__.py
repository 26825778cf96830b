"""Looks at an experiment's data without its model: a digest of the batches that it will see."""

import argparse
import os
import sys
from collections.abc import Sequence

from praxis_lite.config.command_line import Parser
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.processes.stream_digest import stream_digest


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, and a paragraph, for what the user can mend."""
    parser = Parser(prog="python -m praxis_lite.inputs", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="digest")
    one = commands.add_parser(
        "digest", help="SHA-256 of whole batches",
        description="Prints the SHA-256 of the global batches of a dataset. It is the same for "
        "any number of processes: each makes its rows alone.",
    )
    one.add_argument("--exp", metavar="NAME", required=True, help="experiment, as of main.py")
    one.add_argument("--packages", metavar="NAME,...", default="", help="as of main.py")
    one.add_argument("--set", dest="settings", metavar="path=value", nargs="+", default=[],
                     action="extend", help="as of main.py")
    one.add_argument("--dataset", metavar="NAME", default=TRAIN, help=f"default: {TRAIN}")
    one.add_argument("--processes", type=int, default=1, metavar="N", help="default: 1")
    one.add_argument("--batches", type=int, default=10, metavar="M", help="default: 10")
    one.add_argument("--start", type=int, default=0, metavar="K", help="the first batch")
    try:
        args = parser.parse_args(argv)
        pipeline = _pipeline(args)
        found = stream_digest(
            pipeline, args.batches, start=args.start, num_processes=args.processes
        )
    except ConfigError as error:
        print(f"error: {str(error).split(chr(10) * 2 + 'Fiddle context:')[0]}", file=sys.stderr)
        return 2
    print(
        f"{found}  {args.dataset} of {args.exp}, batches {args.start} to "
        f"{args.start + args.batches - 1}, {args.processes} processes"
    )
    return 0


def _pipeline(args: argparse.Namespace) -> InputPipeline:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Data needs no accelerator.
    from praxis_lite.config.build import build
    from praxis_lite.config.class_attributes import configured
    from praxis_lite.experiment import registry

    packages = [name for name in args.packages.split(",") if name]
    experiment = registry.get_experiment(args.exp, packages)
    config = configured(experiment, args.settings, registry.allowed_packages(packages))
    if args.dataset not in config.datasets:
        raise ConfigError(
            f"--dataset={args.dataset}: {args.exp} has the datasets {sorted(config.datasets)}."
            f"{did_you_mean(args.dataset, config.datasets)}"
        )
    return build(config.datasets[args.dataset])


if __name__ == "__main__":
    sys.exit(main())
