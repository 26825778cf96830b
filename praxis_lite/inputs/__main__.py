"""Looks at an experiment's data without its model: makes it ready, or prints a digest of it.

Of a job that was trained it proves which examples were used; exit status 1 if that fails.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

from praxis_lite.core.errors import ConfigError, did_you_mean, printable
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.processes.stream_digest import stream_digest
from praxis_lite.run.command import Parser, status_of

_SECONDS_BETWEEN_LINES = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, and a paragraph, for errors that the user can mend."""
    return status_of(lambda: _run(argv), goes_on=False)


def _run(argv: Sequence[str] | None) -> int | None:
    parser = Parser(prog="python -m praxis_lite.inputs", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="{digest,prepare}")
    item = commands.add_parser(
        "digest", help="SHA-256 of whole batches; of a job: proof of which examples it used",
        description="Prints the SHA-256 of the global batches of a dataset. It is the same for "
        "any number of processes: each makes its rows alone. With --job it proves that the job "
        "used every example exactly once, in order, by what each process recorded and by the data "
        "made again; exit status 1 if it did not.",
    )
    item.add_argument("--dataset", metavar="NAME", help=f"default: {TRAIN}")
    item.add_argument("--processes", type=int, metavar="N", help="default: 1")
    item.add_argument("--batches", type=int, metavar="M", help="default: 10")
    item.add_argument("--start", type=int, metavar="K", help="the first batch")
    item.add_argument("--job", metavar="DIR", help="in place of --exp: a job's directory")
    item.add_argument(
        "--recorded-only", action="store_true",
        help="with --job: look at the record alone, where the data are not there",
    )
    other = commands.add_parser(
        "prepare", help="indexes, tokens and packed rows of all datasets, before a job needs them",
        description="Checks all datasets of an experiment: files are indexed and tokenised on all "
        "cores, and what is wrong with them is told. A job that starts then finds all of it ready.",
    )
    for command, function in ((item, _print_digest), (other, _prepare)):
        command.set_defaults(command=function)
        command.add_argument("--exp", metavar="NAME", help="as of main.py")
        command.add_argument("--packages", metavar="NAME,...", default="", help="as of main.py")
        command.add_argument("--set", dest="settings", metavar="path=value", nargs="+", default=[],
                             action="extend", help="as of main.py")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("praxis_lite").setLevel(logging.INFO)
    options = vars(parser.parse_args(argv))
    command, exp, job = options.pop("command"), options.pop("exp"), options.pop("job", None)
    settings, packages = options.pop("settings"), options.pop("packages")
    listed = [name for name in packages.split(",") if name]
    recorded_only = options.pop("recorded_only", False)
    if job is not None:
        others = {"exp": exp, **options}
        given = [f"--{name}" for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(
                f"--job proves all batches of {TRAIN} of a job; {', '.join(given)} goes with --exp "
                "alone. Leave one of them out."
            )
        return _prove(job, settings, listed, recorded_only)
    if recorded_only:
        raise ConfigError("--recorded-only goes with --job=DIR: name the job's directory.")
    if exp is None:
        raise ConfigError("--exp=NAME is missing: whose data? (Of a job: digest --job=DIR.)")
    command(_pipelines(exp, settings, listed), exp, **options)
    return None


def _prove(job: str, settings: Sequence[str], packages: Sequence[str], recorded_only: bool) -> int:
    """Prints the proof of a job's examples; returns 1 if something is wrong."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Data needs no accelerator.
    from praxis_lite.run.experiment.recorded_examples import proof_of_examples
    from praxis_lite.run.goodput.goodput import num_lost_steps
    from praxis_lite.run.job.job_dir import open_for_reading

    job_dir = open_for_reading(job, writes=False)
    proof = proof_of_examples(
        job_dir, packages=packages, settings=settings, recorded_only=recorded_only,
        progress=Progress(), num_lost_steps=num_lost_steps(job_dir),
    )
    for line in proof.lines():
        print(printable(line))
    return int(bool(proof.faults))


class Progress:
    """Says every ten seconds how many steps are compared."""

    def __init__(self):
        self._said = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            line = f"{done:,} of {of:,} steps compared ({done / of:.0%})"
            print(line, file=sys.stderr, flush=True)


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
    pipelines: Mapping[str, InputPipeline], exp: str, *, dataset: str | None,
    processes: int | None, batches: int | None, start: int | None,
) -> None:
    dataset, start = TRAIN if dataset is None else dataset, start or 0
    processes = 1 if processes is None else processes
    batches = 10 if batches is None else batches
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


def _pipelines(
    exp: str, settings: Sequence[str], packages: Sequence[str]
) -> dict[str, InputPipeline]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Data needs no accelerator.
    from praxis_lite.run.config.build import build
    from praxis_lite.run.experiment.launched_config import config_of_experiment

    return build(config_of_experiment(exp, settings, packages).config.datasets)


if __name__ == "__main__":
    sys.exit(main())
