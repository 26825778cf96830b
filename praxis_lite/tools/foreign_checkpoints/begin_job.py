"""A new job whose checkpoint of step 0 has weights that another system has trained."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.files.json_text import opened_to_append
from praxis_lite.files.whole_files import not_written
from praxis_lite.inputs.base import TRAIN
from praxis_lite.run.checkpoints.checkpoints import Checkpoints
from praxis_lite.run.checkpoints.init.frozen_base import check_frozen_base
from praxis_lite.run.checkpoints.init.initial_state import InitialState, Note, begun
from praxis_lite.run.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.run.config.build import build
from praxis_lite.run.config.overrides import check_required
from praxis_lite.run.config.text import config_lines, dump_config
from praxis_lite.run.experiment import registry
from praxis_lite.run.experiment.experiment import Job
from praxis_lite.run.experiment.launched_config import config_of_experiment
from praxis_lite.run.job.job_dir import JobDir, open_for_training
from praxis_lite.run.job.job_lock import JobLock
from praxis_lite.run.job.local_directory import local_directory
from praxis_lite.run.trainer.checks.memory import check_fits
from praxis_lite.run.trainer.job_on_mesh import partitioner_of


@contextlib.contextmanager
def beginning(
    job_log_dir: str | os.PathLike[str], experiment: str, packages: Sequence[str] = ()
) -> Iterator[JobDir]:
    """Yields the directory of a job that is to begin, cleared again if what follows fails.

    A mark in it says that the job is half made. Where a command was killed, and left the mark, the
    same command begins anew.

    Raises:
      ConfigError: the experiment is not known, or the directory is of another job, cannot be
        written or has checkpoints; or the disk does not take what follows.
    """
    name = registry.full_name(registry.get_experiment(experiment, packages))
    job_dir = JobDir(local_directory(job_log_dir))
    if job_dir.beginning.is_file() and not job_dir.config_json.exists():
        with _marked(job_dir):
            _clear(job_dir)
    job_dir = open_for_training(job_log_dir, name)
    saved_before = sorted(path.name for path in job_dir.checkpoints.glob("*"))
    if saved_before:
        raise ConfigError(
            f"{job_dir.path} has checkpoints already ({few(saved_before)}), and a job can begin "
            "only where there are none. Name a new directory."
        )
    had_config = job_dir.config_json.exists()
    with _marked(job_dir):
        try:
            yield job_dir
        except BaseException as error:
            if not had_config:  # Of a job without its weights, which training would draw.
                with contextlib.suppress(OSError):
                    job_dir.config_json.unlink(missing_ok=True)
            _clear(job_dir)
            if isinstance(error, OSError) and not isinstance(error, ConfigError):
                path = error.filename or job_dir.path
                raise not_written(path, error, "it begins the job anew") from error
            raise


@contextlib.contextmanager
def _marked(job_dir: JobDir) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(JobLock(job_dir.path, print))
            opened_to_append(job_dir.beginning).close()
        except OSError as error:
            raise not_written(job_dir.beginning, error) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                job_dir.beginning.unlink(missing_ok=True)


def _clear(job_dir: JobDir) -> None:
    """Removes the files of a job that has not begun from its directory, as far as possible."""
    for folder in (job_dir.huggingface, job_dir.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    if not job_dir.config_json.exists():
        with contextlib.suppress(OSError):
            job_dir.config_txt.unlink(missing_ok=True)


def begin_job_with(
    source: Callable[[Partitioner, Job], InitialState],
    experiment: str,
    job_dir: JobDir,
    settings: Sequence[str] = (),
    packages: Sequence[str] = (),
    note: Note = lambda line: None,
) -> JobDir:
    """Returns the job as if its step 0 was saved, to be trained or evaluated.

    The optimizer's slots are new, made from the weights, and the training data starts at its first
    batch.

    Args:
      source: returns the initial state; what it leaves out is drawn with the run's seed.
      experiment: its name, as for `--exp`.
      job_dir: of `beginning`.
      settings: "path=value", as for `--set`.
      packages: as for `--packages`.
      note: told how far the reading is.

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


def how_to_go_on(
    job_dir: JobDir, experiment: str, settings: Sequence[str] = (), packages: Sequence[str] = ()
) -> str:
    """Returns the words printed of a job that was begun: the command that trains it."""
    words = ["main.py", f"--exp={experiment}", f"--job_log_dir={job_dir.path}"]
    words += [f"--packages={','.join(packages)}"] if packages else []
    words += ["--set", *settings] if settings else []
    return f"began {job_dir.path}: go on with {shlex.join(words)}"
