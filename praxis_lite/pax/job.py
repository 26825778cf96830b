"""Creates a job with the weights of a Pax checkpoint.

    python -m praxis_lite.pax.job --exp=NAME --pax=DIR --job_log_dir=DIR [--set path=value]

The job has a checkpoint of step 0: train, evaluate or decode it with `main.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.job.command import Parser, run
from praxis_lite.job.processes.standard_output import print_log

if TYPE_CHECKING:
    from praxis_lite.checkpoints.init.initial_state import InitialState
    from praxis_lite.core.partitioner.partitioner import Partitioner
    from praxis_lite.experiment.experiment import Job
    from praxis_lite.job.job_dir import JobDir


def begin_job(
    experiment: str, pax_directory: str | Path, job_log_dir: str | Path, *, step: int | None = None,
    settings: Sequence[str] = (), ignore: Sequence[str] = (), new: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> "JobDir":
    """Returns a new job of an experiment whose checkpoint of step 0 has Pax's weights.

    The optimizer's slots are new, and the training data starts at its first batch.

    Args:
      experiment: its name, as for `--exp`.
      pax_directory, step: see `read_pax_checkpoint`.
      job_log_dir: new or empty.
      settings: "path=value", as for `--set`.
      ignore, new: see `mdl_vars_from_pax`; new weights are drawn with the run's seed.
      packages: as for `--packages`.

    Raises:
      ConfigError: the directory has a job already, or the weights do not fit the model.
    """
    # Import slow modules here, so that Ctrl-C during the import prints no traceback.
    from praxis_lite.pax.checkpoints import read_pax_checkpoint
    from praxis_lite.pax.weights import FromPax
    from praxis_lite.trainer.begin_job import begin_job_with, new_job_dir

    # First, because the path may be wrong.
    result = read_pax_checkpoint(pax_directory, step)

    def source(partitioner: "Partitioner", job: "Job") -> "InitialState":
        return FromPax(result, partitioner, ignore=ignore, new=new, seed=job.run.seed)

    with new_job_dir(job_log_dir, experiment, packages) as job_dir:
        return begin_job_with(source, experiment, job_dir, settings, packages)


def main(argv: Sequence[str] | None = None) -> None:
    """Begins a job with the weights of a Pax job, from the command line."""
    run(lambda: _begin(argv), continues_without_output=True)


def _begin(argv: Sequence[str] | None) -> None:
    print_log()
    parser = Parser(
        prog="python -m praxis_lite.pax.job", allow_abbrev=False,
        description="Begins a job with the weights of a Pax job.",
    )
    parser.add_argument("--exp", metavar="NAME", required=True, help="experiment")
    parser.add_argument("--packages", metavar="NAME,...", type=lambda words: words.split(","),
                        action="extend", default=[], help="as of main.py")
    parser.add_argument("--pax", metavar="DIR", required=True, help="Pax's job_log_dir")
    parser.add_argument("--pax_step", metavar="N", type=int, help="default: the newest")
    parser.add_argument("--job_log_dir", metavar="DIR", required=True, help="a new directory")
    parser.add_argument("--ignore", metavar="PATTERN", nargs="+", default=[],
                        help="variables of Pax to leave out")
    parser.add_argument("--new", metavar="PATTERN", nargs="+", default=[],
                        help="weights of the model that Pax lacks")
    parser.add_argument("--set", dest="settings", metavar="path=value", nargs="+",
                        action="extend", default=[], help="as of main.py")
    args = parser.parse_args(argv)
    job = begin_job(args.exp, args.pax, args.job_log_dir, step=args.pax_step,
                    settings=args.settings, ignore=args.ignore, new=args.new,
                    packages=args.packages)
    from praxis_lite.trainer.begin_job import next_command

    print(next_command(job, args.exp, args.settings, args.packages))


if __name__ == "__main__":
    main()
