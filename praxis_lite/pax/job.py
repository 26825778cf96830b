"""Command-line program that creates a job with the weights from a Pax checkpoint.

    python -m praxis_lite.pax.job --exp=NAME --pax=DIR --job_log_dir=DIR [--set path=value]

The new job has a checkpoint at step 0, from which `main.py` can train, evaluate or decode.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.job.command import Parser, run

if TYPE_CHECKING:
    from praxis_lite.checkpoints.init.initial_state import InitialState
    from praxis_lite.core.partitioner.partitioner import Partitioner
    from praxis_lite.experiment.experiment import Job
    from praxis_lite.job.job_dir import JobDir


def begin_job(
    experiment: str,
    pax_directory: str | Path,
    job_log_dir: str | Path,
    *,
    step: int | None = None,
    settings: Sequence[str] = (),
    ignore: Sequence[str] = (),
    new: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> "JobDir":
    """Creates a job whose checkpoint at step 0 contains the weights from a Pax checkpoint.

    Optimizer slots are initialized, and the training data starts at the first batch.

    Args:
      experiment: Name of the experiment, as for `--exp`.
      pax_directory: Pax job or checkpoint, as in `read_pax_checkpoint`.
      job_log_dir: New or empty directory for the job.
      step: Step of the Pax checkpoint, or None for the latest.
      settings: Settings "path=value", as for `--set`.
      ignore: Patterns of Pax variables to ignore; see `mdl_vars_from_pax`.
      new: Patterns of weights to initialize with the run's seed, because they are not in the Pax
        checkpoint; see `mdl_vars_from_pax`.
      packages: Packages to search for the experiment, as for `--packages`.

    Returns:
      The directory of the job.

    Raises:
      ConfigError: The directory already contains a job, or the weights do not fit the model.
    """
    # Import slow modules here, so that Ctrl-C during the import prints no traceback.
    from praxis_lite.pax.checkpoints import read_pax_checkpoint
    from praxis_lite.pax.weights import FromPax
    from praxis_lite.trainer.create_job import create_job, new_job_dir

    # Open the checkpoint before the job's directory is created, because the path may be wrong.
    checkpoint = read_pax_checkpoint(pax_directory, step)

    def initial_state(partitioner: "Partitioner", job: "Job") -> "InitialState":
        return FromPax(checkpoint, partitioner, ignore=ignore, new=new, seed=job.run.seed)

    with new_job_dir(job_log_dir, experiment, packages) as job_dir:
        return create_job(initial_state, experiment, job_dir, settings, packages)


def main(argv: Sequence[str] | None = None) -> None:
    """Creates a job from a Pax checkpoint, with arguments from the command line."""
    run(lambda: _begin(argv), continues_without_output=True)


def _begin(argv: Sequence[str] | None) -> None:
    parser = Parser(
        prog="python -m praxis_lite.pax.job",
        allow_abbrev=False,
        description="Creates a job with the weights of a Pax checkpoint.",
    )
    parser.add_argument("--exp", metavar="NAME", required=True, help="experiment")
    parser.add_argument(
        "--packages",
        metavar="NAME,...",
        type=lambda words: words.split(","),
        action="extend",
        default=[],
        help="as for main.py",
    )
    parser.add_argument("--pax", metavar="DIR", required=True, help="job_log_dir of the Pax job")
    parser.add_argument(
        "--pax_step", metavar="N", type=int, help="step of the Pax checkpoint; default: the latest"
    )
    parser.add_argument(
        "--job_log_dir", metavar="DIR", required=True, help="new directory for the job"
    )
    parser.add_argument(
        "--ignore", metavar="PATTERN", nargs="+", default=[], help="Pax variables to ignore"
    )
    parser.add_argument(
        "--new",
        metavar="PATTERN",
        nargs="+",
        default=[],
        help="weights to initialize, because Pax lacks them",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="path=value",
        nargs="+",
        action="extend",
        default=[],
        help="settings of the job, as for main.py",
    )
    args = parser.parse_args(argv)
    job = begin_job(
        args.exp,
        args.pax,
        args.job_log_dir,
        step=args.pax_step,
        settings=args.settings,
        ignore=args.ignore,
        new=args.new,
        packages=args.packages,
    )
    from praxis_lite.trainer.create_job import next_command

    print(next_command(job, args.exp, args.settings, args.packages))


if __name__ == "__main__":
    main()
