"""Creates a job from pretrained weights by saving them as the checkpoint for step 0."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.frozen_base import check_frozen_base
from praxis_lite.checkpoints.init.initial_state import InitialState, Note, begun
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.config.build import build
from praxis_lite.config.config_json import config_lines, dump_config
from praxis_lite.config.overrides import check_required
from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment import registry
from praxis_lite.experiment.experiment import Job
from praxis_lite.experiment.launched_config import config_of_experiment
from praxis_lite.host.object_stores import remove_folder
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job.job_dir import JobDir, open_for_training
from praxis_lite.trainer.checks.memory import check_fits
from praxis_lite.trainer.job_on_mesh import partitioner_of


@contextlib.contextmanager
def new_job_dir(
    job_log_dir: str | os.PathLike[str], experiment: str, packages: Sequence[str] = ()
) -> Iterator[JobDir]:
    """Locks the directory of a new job, and removes the job's files if the body raises.

    Yields:
      The job directory.

    Raises:
      ConfigError: The experiment is unknown, or the directory is not writable or already contains a
        job or other files.
    """
    name = callable_name(registry.get_experiment(experiment, packages))
    job_dir = open_for_training(job_log_dir, name)
    with job_dir.locked(print), job_dir.uploading():
        if job_dir.config_json.exists():
            raise ConfigError(f"{job_dir.location} already has a job. Use a new directory.")
        try:
            yield job_dir
        except BaseException:
            shutil.rmtree(job_dir.huggingface, ignore_errors=True)
            remove_folder(job_dir.checkpoints)
            for file in (job_dir.config_json, job_dir.config_txt):
                file.unlink(missing_ok=True)
            raise


def create_job(
    source: Callable[[Partitioner, Job], InitialState],
    experiment: str,
    job_dir: JobDir,
    settings: Sequence[str] = (),
    packages: Sequence[str] = (),
    note: Note = lambda line: None,
) -> JobDir:
    """Saves the step-0 checkpoint for a new job, which can then be trained or evaluated.

    Optimizer slots are initialized, and training starts with the first batch of the data.

    Args:
      source: Function that returns the pretrained arrays. All other arrays are initialized randomly
        from the run's seed.
      experiment: Name of the experiment, as for `--exp`.
      job_dir: The directory that `new_job_dir` yielded.
      settings: Settings "path=value", as for `--set`.
      packages: Packages to import, as for `--packages`.
      note: Function that prints progress messages.

    Returns:
      `job_dir`.

    Raises:
      ConfigError: The task does not fit its mesh, or the weights do not fit the task.
    """
    launched = config_of_experiment(experiment, settings, packages)
    check_required(launched.config)
    job = build(launched.config)
    # In mode "load", no dataset is checked, because the user may choose the data later.
    partitioner = partitioner_of(job, "load")
    check_fits(partitioner.layout, partitioner.mesh, "train")
    initial, groups = source(partitioner, job), partitioner.bound_learner.groups
    check_frozen_base(groups, initial.paths, may_be_new=job.run.frozen_may_be_new)
    state = begun(partitioner, partitioner.key(job.run.seed), initial, note)
    data = {"next_batch": 0, "fingerprint": job.datasets[TRAIN].fingerprint()}
    with Checkpoints(job_dir.checkpoints, saving=SaveSettings()) as checkpoints:
        checkpoints.save(0, state, partitioner.layout, data)
    text = dump_config(launched.config, launched.experiment, settings, packages=packages)
    job_dir.write_config(text, config_lines(launched.config))
    return job_dir


def next_command(
    job_dir: JobDir, experiment: str, settings: Sequence[str] = (), packages: Sequence[str] = ()
) -> str:
    """Returns a message with the command that trains the new job."""
    command = ["praxis", "train", experiment, f"--job_log_dir={job_dir.location}"]
    command += [f"--packages={','.join(packages)}"] if packages else []
    command += ["--set", *settings] if settings else []
    return f"created {job_dir.location}: continue with {shlex.join(command)}"
