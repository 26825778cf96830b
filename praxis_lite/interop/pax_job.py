"""Begins a job with the weights of a Pax checkpoint, from which `main.py` then goes on.

    python -m praxis_lite.interop.pax_job --exp=NAME --pax=DIR --job_log_dir=DIR [--set path=value]

Afterwards the job is as one whose step 0 was saved: train, evaluate or decode it with `main.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import fiddle as fdl
import jax

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.init_from_checkpoint import completed
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.config.class_attributes import configured
from praxis_lite.config.overrides import check_required
from praxis_lite.config.text import config_lines, dump_config
from praxis_lite.errors import ConfigError
from praxis_lite.experiment import registry
from praxis_lite.inputs.base import TRAIN
from praxis_lite.interop.pax import mdl_vars_from_pax
from praxis_lite.interop.pax_checkpoints import read_pax_checkpoint
from praxis_lite.job.job_dir import JobDir, open_for_training
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import make_mesh, simulate_devices
from praxis_lite.trainer.memory import check_fits


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
    experiment_class = registry.get_experiment(experiment, packages)
    allowed = registry.allowed_packages(packages)
    config = configured(experiment_class, settings, allowed)
    check_required(config)
    job = fdl.build(config)
    name = registry.full_name(experiment_class)
    job_dir = open_for_training(job_log_dir, name)
    simulate_devices(job.mesh.num_devices)
    partitioner = (job.partitioner or Partitioner)(job.task, make_mesh(job.mesh))
    check_fits(partitioner.layout, partitioner.mesh, "train")
    weights = read_pax_checkpoint(pax_directory, step)
    key = jax.random.key(job.run.seed)
    mdl_vars = mdl_vars_from_pax(job.task.model, weights, ignore=ignore, new=new, key=key)
    with Checkpoints(job_dir.checkpoints, saving=SaveSettings()) as saved:
        if saved.latest_step() is not None:
            raise ConfigError(
                f"{job_dir.path} has a checkpoint of step {saved.latest_step()} already. Name a "
                "new directory."
            )
        data = {"next_batch": 0, "fingerprint": job.datasets[TRAIN].fingerprint()}
        layout = partitioner.layout.select("mdl_vars")
        place = jax.jit(layout.pad, out_shardings=layout.shardings(partitioner.mesh))
        weights = zip(layout.leaves(), jax.tree.leaves(place(mdl_vars)), strict=True)
        arrays = {f"mdl_vars/{leaf.path}": x for leaf, x in weights}
        state = completed(partitioner, key, arrays)
        saved.save(0, state, partitioner.layout, data)
    text = dump_config(config, name, settings, packages=packages)
    job_dir.write_config(text, config_lines(config))
    return job_dir


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
    packages = f" --packages={','.join(args.packages)}" if args.packages else ""
    print(
        f"began {job.path}: go on with main.py --exp={args.exp}{packages} --job_log_dir={job.path}"
    )


if __name__ == "__main__":
    main()
