"""Creates a job whose checkpoint of step 0 has weights that another system trained."""

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
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job.job_dir import JobDir, open_for_training
from praxis_lite.job.job_lock import JobLock
from praxis_lite.trainer.checks.memory import check_fits
from praxis_lite.trainer.job_on_mesh import partitioner_of


@contextlib.contextmanager
def new_job_dir(
    job_log_dir: str | os.PathLike[str], experiment: str, packages: Sequence[str] = ()
) -> Iterator[JobDir]:
    """Yields the locked directory of a new job; removes the job's files if the body fails.

    Raises:
      ConfigError: the experiment is unknown, or the directory has a job, has other files or cannot
        be written.
    """
    name = callable_name(registry.get_experiment(experiment, packages))
    job_dir = open_for_training(job_log_dir, name)
    with JobLock(job_dir.path, print):
        if job_dir.config_json.exists():
            raise ConfigError(f"{job_dir.path} already has a job. Name a new directory.")
        try:
            yield job_dir
        except BaseException:
            for folder in (job_dir.huggingface, job_dir.checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
            for file in (job_dir.config_json, job_dir.config_txt):
                file.unlink(missing_ok=True)
            raise


def begin_job_with(
    source: Callable[[Partitioner, Job], InitialState],
    experiment: str,
    job_dir: JobDir,
    settings: Sequence[str] = (),
    packages: Sequence[str] = (),
    note: Note = lambda line: None,
) -> JobDir:
    """Saves step 0 of a new job and returns the job, which can be trained or evaluated.

    The optimizer's slots are new, and the training data starts at its first batch.

    Args:
      source: returns the initial state; other arrays are drawn with the run's seed.
      experiment: its name, as for `--exp`.
      job_dir: from `new_job_dir`.
      settings: "path=value", as for `--set`.
      packages: as for `--packages`.
      note: called with the progress of the reading.

    Raises:
      ConfigError: the task does not fit its mesh, or the weights do not fit the task.
    """
    launched = config_of_experiment(experiment, settings, packages)
    check_required(launched.config)
    job = build(launched.config)
    partitioner = partitioner_of(job, "load")  # Its data may be chosen when it is trained.
    check_fits(partitioner.layout, partitioner.mesh, "train")
    initial, groups = source(partitioner, job), partitioner.learner.groups
    check_frozen_base(groups, initial.paths, may_be_new=job.run.frozen_may_be_new)
    state = begun(partitioner, partitioner.key(job.run.seed), initial, note)
    data = {"next_batch": 0, "fingerprint": job.datasets[TRAIN].fingerprint()}
    with Checkpoints(job_dir.checkpoints, saving=SaveSettings()) as saved:
        saved.save(0, state, partitioner.layout, data)
    text = dump_config(launched.config, launched.experiment, settings, packages=packages)
    job_dir.write_config(text, config_lines(launched.config))
    return job_dir


def next_command(
    job_dir: JobDir, experiment: str, settings: Sequence[str] = (), packages: Sequence[str] = ()
) -> str:
    """Returns a message with the command that trains the new job."""
    words = ["main.py", f"--exp={experiment}", f"--job_log_dir={job_dir.path}"]
    words += [f"--packages={','.join(packages)}"] if packages else []
    words += ["--set", *settings] if settings else []
    return f"created {job_dir.path}: continue with {shlex.join(words)}"
