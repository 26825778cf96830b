"""`praxis inputs`: prepares an experiment's data without its model, or digests its batches.

`digest --job` verifies which examples a job has trained on. The exit status is 1 if the
verification fails.
"""

import argparse
import logging
import os
import time
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError, did_you_mean, printable
from praxis_lite.job.command import Parser
from praxis_lite.modes.options import add_packages, add_settings
from praxis_lite.programs.program import Program

if TYPE_CHECKING:
    from praxis_lite.inputs.base import InputPipeline

_SECONDS_BETWEEN_LINES = 10.0
_TRAIN = "train"


class Inputs(Program):
    """Prepares the data of an experiment, or prints a digest of its batches."""

    name = "inputs"
    summary = "prepares an experiment's data, or verifies which examples a job used"
    logs_to_stderr = True

    def add_arguments(self, parser: Parser) -> None:
        """Adds the subcommands digest and prepare."""
        commands = parser.add_subparsers(required=True, metavar="{digest,prepare}")
        digest = commands.add_parser(
            "digest",
            help="print the SHA-256 of global batches, or verify which examples a job used",
            description="Prints the SHA-256 of a dataset's global batches, which does not depend "
            "on the number of processes. With --job, recomputes the data and compares it with the "
            "processes' records, to verify that the job used every example exactly once, in order; "
            "the exit status is 1 if the verification fails.",
        )
        digest.add_argument("--dataset", metavar="NAME", help=f"default: {_TRAIN}")
        digest.add_argument("--processes", type=int, metavar="N", help="default: 1")
        digest.add_argument("--batches", type=int, metavar="M", help="default: 10")
        digest.add_argument("--start", type=int, metavar="K", help="first batch; default: 0")
        digest.add_argument("--job", metavar="JOB", help="a job's directory, instead of EXP")
        digest.add_argument(
            "--recorded-only",
            action="store_true",
            help="with --job: check only the records, for example if the data is not available",
        )
        prepare = commands.add_parser(
            "prepare",
            help="index, tokenize and pack all datasets before a job needs them",
            description="Checks all datasets of an experiment: indexes and tokenizes their files "
            "on all cores, caches the results for later jobs, and reports errors in the data.",
        )
        for command, function in ((digest, _digest), (prepare, _prepare)):
            command.set_defaults(command=function)
            is_optional = command is digest
            command.add_argument(
                "exp", metavar="EXP", nargs="?" if is_optional else None, help="the experiment"
            )
            add_packages(command)
            add_settings(command)

    def run(self, args: argparse.Namespace) -> int | None:
        """Runs a subcommand; raises ConfigError if the experiment or its data is invalid."""
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Input pipelines need no accelerator.
        return args.command(args)


def _digest(args: argparse.Namespace) -> int | None:
    if args.job is not None:
        given = {"EXP": args.exp, "--dataset": args.dataset, "--processes": args.processes}
        given |= {"--batches": args.batches, "--start": args.start}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} cannot be combined with --job, which verifies all batches of the "
                    f"job's dataset {_TRAIN}. Remove one of the two."
                )
        return _verify(args)
    if args.recorded_only:
        raise ConfigError("--recorded-only requires --job=DIR.")
    pipelines, dataset = _pipelines(args), args.dataset or _TRAIN
    if dataset not in pipelines:
        raise ConfigError(
            f"--dataset={dataset}: the datasets of {args.exp} are {sorted(pipelines)}."
            f"{did_you_mean(dataset, pipelines)}"
        )
    start = args.start or 0
    processes = 1 if args.processes is None else args.processes
    batches = 10 if args.batches is None else args.batches

    from praxis_lite.inputs.processes.stream_digest import stream_digest

    digest = stream_digest(pipelines[dataset], batches, start=start, num_processes=processes)
    print(
        f"{digest}  {dataset} of {args.exp}, batches {start} to {start + batches - 1}, "
        f"processes={processes}"
    )
    return None


def _verify(args: argparse.Namespace) -> int:
    """Prints which examples a job used, and returns 1 if they differ from the expected examples."""
    from praxis_lite.experiment.recorded_examples import proof_of_examples
    from praxis_lite.installed_tools import installed_job_tools
    from praxis_lite.job.job_dir import open_for_reading

    last_logged = time.monotonic()

    def log_progress(num_done: int, num_steps: int) -> None:
        nonlocal last_logged
        if time.monotonic() - last_logged >= _SECONDS_BETWEEN_LINES:
            last_logged = time.monotonic()
            share = f"{num_done / num_steps:.0%}"
            _log.info("%s of %s steps compared (%s)", f"{num_done:,}", f"{num_steps:,}", share)

    job_dir = open_for_reading(args.job, writes=False)
    proof = proof_of_examples(
        job_dir,
        packages=args.packages,
        settings=args.settings,
        recorded_only=args.recorded_only,
        progress=log_progress,
        num_lost_steps=installed_job_tools().num_lost_steps(job_dir),
    )
    for line in proof.lines():
        print(printable(line))
    return int(bool(proof.faults))


def _prepare(args: argparse.Namespace) -> None:
    from praxis_lite.core.sharding.batch_sharding import num_rows_of
    from praxis_lite.inputs.pipeline_checks import check_data

    for name, pipeline in _pipelines(args).items():
        start = time.monotonic()
        check_data(pipeline, f"datasets.{name}")
        count = pipeline.num_batches
        batches = "endless batches" if count is None else f"{count:,} batches"
        seconds = time.monotonic() - start
        numbers = [num_rows_of(spec) for spec in pipeline.element_specs()]
        rows = " or ".join(map(str, sorted(set(numbers))))
        print(f"{name}: {batches} of {rows} rows, ready in {seconds:.1f} s")


def _pipelines(args: argparse.Namespace) -> "dict[str, InputPipeline]":
    from praxis_lite.config.build import build
    from praxis_lite.experiment.launched_config import config_of_experiment

    if args.exp is None:
        raise ConfigError(
            "The experiment is missing: praxis inputs digest EXP. To check a job, use --job=JOB."
        )
    return build(config_of_experiment(args.exp, args.settings, args.packages).config.datasets)


_log = logging.getLogger(__name__)
