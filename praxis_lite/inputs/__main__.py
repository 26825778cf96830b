"""Looks at an experiment's data without its model: makes it ready, or prints a digest of it."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.processes.stream_digest import stream_digest
from praxis_lite.run.command import Parser, status_of


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, and a paragraph, for errors that the user can mend."""
    return status_of(lambda: _run(argv), goes_on=False)


def _run(argv: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m praxis_lite.inputs", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{digest,prepare}")
    item = commands.add_parser(
        "digest", help="SHA-256 of whole batches",
        description="Prints the SHA-256 of the global batches of a dataset. It is the same for "
        "any number of processes: each makes its rows alone.",
    )
    item.add_argument("--dataset", metavar="NAME", default=TRAIN, help=f"default: {TRAIN}")
    item.add_argument("--processes", type=int, default=1, metavar="N", help="default: 1")
    item.add_argument("--batches", type=int, default=10, metavar="M", help="default: 10")
    item.add_argument("--start", type=int, default=0, metavar="K", help="the first batch")
    other = commands.add_parser(
        "prepare", help="indexes, tokens and packed rows of all datasets, before a job needs them",
        description="Checks all datasets of an experiment: files are indexed and tokenised on all "
        "cores, and what is wrong with them is told. A job that starts then finds all of it ready.",
    )
    for command, function in ((item, _print_digest), (other, _prepare)):
        command.set_defaults(command=function)
        command.add_argument("--exp", metavar="NAME", required=True, help="as of main.py")
        command.add_argument("--packages", metavar="NAME,...", default="", help="as of main.py")
        command.add_argument("--set", dest="settings", metavar="path=value", nargs="+", default=[],
                             action="extend", help="as of main.py")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("praxis_lite").setLevel(logging.INFO)
    options = vars(parser.parse_args(argv))
    command, exp = options.pop("command"), options.pop("exp")
    pipelines = _pipelines(exp, options.pop("settings"), options.pop("packages"))
    command(pipelines, exp, **options)


def _prepare(pipelines: Mapping[str, InputPipeline], exp: str) -> None:
    from praxis_lite.inputs.batches import check_data

    for name, pipeline in pipelines.items():
        began = time.monotonic()
        check_data(pipeline, f"datasets.{name}")
        count = pipeline.num_batches
        batches = "batches without end" if count is None else f"{count:,} batches"
        seconds = time.monotonic() - began
        print(f"{name}: {batches} of {pipeline.batch_size} rows, ready in {seconds:.1f} s")


def _print_digest(
    pipelines: Mapping[str, InputPipeline], exp: str, *, dataset: str, processes: int,
    batches: int, start: int,
) -> None:
    if dataset not in pipelines:
        raise ConfigError(
            f"--dataset={dataset}: {exp} has the datasets {sorted(pipelines)}."
            f"{did_you_mean(dataset, pipelines)}"
        )
    digest = stream_digest(pipelines[dataset], batches, start=start, num_processes=processes)
    print(
        f"{digest}  {dataset} of {exp}, batches {start} to {start + batches - 1}, "
        f"processes={processes}"
    )


def _pipelines(exp: str, settings: Sequence[str], packages: str) -> dict[str, InputPipeline]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Data needs no accelerator.
    from praxis_lite.run.config.build import build
    from praxis_lite.run.experiment.launched_config import config_of_experiment

    listed = [name for name in packages.split(",") if name]
    return build(config_of_experiment(exp, settings, listed).config.datasets)


if __name__ == "__main__":
    sys.exit(main())
