"""Begins a job with the weights of a Pax checkpoint, from which `main.py` then goes on.

    python -m praxis_lite.interop.pax_job --exp=NAME --pax=DIR --job_log_dir=DIR [--set path=value]

Afterwards the job is as one whose step 0 was saved: train, evaluate or decode it with `main.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from praxis_lite.errors import ConfigError
from praxis_lite.experiment.experiment import Job
from praxis_lite.interop.begin_job import begin_job_with, how_to_go_on, new_job_dir
from praxis_lite.interop.pax import mdl_vars_from_pax
from praxis_lite.interop.pax_checkpoints import read_pax_checkpoint
from praxis_lite.job.job_dir import JobDir
from praxis_lite.partitioner import Partitioner


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
) -> JobDir:
    """Returns a new job of an experiment whose checkpoint of step 0 has Pax's weights.

    The optimizer's slots are new, made from these weights, and the training data starts at its
    first batch.

    Args:
      experiment: its name, as for `--exp`.
      pax_directory, step: see `read_pax_checkpoint`.
      job_log_dir: a new or an empty directory.
      settings: "path=value", as for `--set`.
      ignore, new: see `mdl_vars_from_pax`; what is new is drawn with the run's seed.
      packages: as for `--packages`.

    Raises:
      ConfigError: the directory has a checkpoint already, or the weights do not fit the model.
    """
    def weights(partitioner: Partitioner, job: Job) -> dict[str, jax.Array]:
        found = read_pax_checkpoint(pax_directory, step)
        key = jax.random.key(job.run.seed)
        mdl_vars = mdl_vars_from_pax(job.task.model, found, ignore=ignore, new=new, key=key)
        layout = partitioner.layout.select("mdl_vars")
        place = jax.jit(layout.pad, out_shardings=layout.shardings(partitioner.mesh))
        paths = [leaf.path for leaf in layout.leaves()]
        return dict(zip(paths, jax.tree.leaves(place(mdl_vars)), strict=True))

    job_dir = new_job_dir(job_log_dir, experiment, packages)
    return begin_job_with(weights, experiment, job_dir, settings, packages)


def main(argv: Sequence[str] | None = None) -> None:
    """Begins a job with the weights of a Pax job, from the command line."""
    parser = argparse.ArgumentParser(description="Begins a job with the weights of a Pax job.")
    parser.add_argument("--exp", metavar="NAME", required=True, help="experiment")
    parser.add_argument("--packages", metavar="NAME,...", type=lambda words: words.split(","),
                        action="extend", default=[], help="as of main.py")
    parser.add_argument("--pax", metavar="DIR", required=True, help="Pax's job_log_dir")
    parser.add_argument("--pax_step", metavar="N", type=int, help="default: the newest")
    parser.add_argument("--job_log_dir", metavar="DIR", required=True, help="a new directory")
    parser.add_argument("--ignore", metavar="PATTERN", nargs="+", default=[],
                        help="variables of Pax's that are not wanted")
    parser.add_argument("--new", metavar="PATTERN", nargs="+", default=[],
                        help="weights of the model that Pax has nothing for")
    parser.add_argument("--set", dest="settings", metavar="path=value", nargs="+",
                        action="extend", default=[], help="as of main.py")
    args = parser.parse_args(argv)
    try:
        job = begin_job(args.exp, args.pax, args.job_log_dir, step=args.pax_step,
                        settings=args.settings, ignore=args.ignore, new=args.new,
                        packages=args.packages)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(how_to_go_on(job, args.exp, args.settings, args.packages))


if __name__ == "__main__":
    main()
