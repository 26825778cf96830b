"""The paths of files in a job directory, and the checks made when a directory is opened."""

import contextlib
import dataclasses
import fnmatch
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from praxis_lite.core.errors import ConfigError, did_you_mean, first_few, shortened
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.file_reading import read_json
from praxis_lite.host.hub import is_hub_url
from praxis_lite.host.object_stores import AnyPath, StorePath, is_store_url
from praxis_lite.host.places import local_folder
from praxis_lite.job import processes
from praxis_lite.job.job_lock import JobLock, Lease, LeaseOfFirst, is_leased, is_locked
from praxis_lite.job.local_directory import local_directory
from praxis_lite.job.mirror import Mirror
from praxis_lite.job.processes.exits import temporary_folder

__all__ = (
    "JobDir",
    "job_dir_at",
    "open_for_supervisors",
    "open_for_reading",
    "recorded_experiment",
)

# Name under decode/ of the dataset that contains the prompts from --prompt and --prompts.
COMMAND_LINE = "command_line"
# Name under decode/ of the dataset that contains run.samples.prompts.
SAMPLES = "samples"


def _child(name: str) -> property:
    return property(lambda self: self.path / name)


@dataclasses.dataclass(frozen=True)
class JobDir:
    """The paths of a job's files. Creating an instance does not access the disk.

    Attributes:
      path: The job directory.
      config_json: The config from which the job is rebuilt. A directory with this file is a job
        directory.
      config_txt: The config as text, one `path=value` per line.
      layout_txt: Shape, spec, bytes per device and padding of every array in the training state.
      layout_json: The contents of layout_txt in JSON.
      init_from_checkpoint_txt: The source of each variable, for a job that starts from pretrained
        weights.
      metrics_jsonl: One line per training step.
      eval_metrics_jsonl: One line per evaluation and dataset.
      certificates_jsonl: One line per certificate from training (run.certify_every_steps).
      timeline_jsonl: How each launch spent its time, with one line per save.
      examples: Folder with one record per process, listing the rows that the process fed to
        training.
      loss_curve_png: Plot of the losses.
      non_finite_txt: The origin of NaN and infinite values in each step that was rerun for
        run.debug_nans.
      residuals_jsonl: Measured and predicted seconds, with one line per profile and per
        `praxis plan` --measure.
      elastic_jsonl: One line per change to the processes of an elastic job.
      elastic: Folder through which the supervisors of an elastic job communicate, also in an object
        store.
      stacks_txt: The watchdog's reports, with the stacks of all threads. In an object store, each
        report is appended directly, because several processes write reports.
      traceback_txt: Traceback of the exception that ended the last launch, if any.
      huggingface: Folder with config.json and tokenizer of the Hugging Face model from which the
        job was started, if any.
      tokenizers: Folder with copies of the tokenizers used in the config.
      tensorboard: Folder of TensorBoard summaries.
      profiles: Folder of profiles, each named after its first step.
      profile_request: File that a user creates to request a profile. It may contain the number of
        steps to profile.
      trackers: Folder with this run's ids in experiment trackers.
      checkpoints: Folder with one checkpoint per saved step.
    """

    path: Path

    config_json = _child("config.json")
    config_txt = _child("config.txt")
    layout_txt = _child("layout.txt")
    layout_json = _child("layout.json")
    init_from_checkpoint_txt = _child("init_from_checkpoint.txt")
    metrics_jsonl = _child("metrics.jsonl")
    eval_metrics_jsonl = _child("eval_metrics.jsonl")
    certificates_jsonl = _child("certificates.jsonl")
    timeline_jsonl = _child("timeline.jsonl")
    examples = _child("examples")
    loss_curve_png = _child("loss_curve.png")
    non_finite_txt = _child("non_finite.txt")
    residuals_jsonl = _child("residuals.jsonl")
    elastic_jsonl = _child("elastic.jsonl")
    traceback_txt = _child("traceback.txt")
    huggingface = _child("huggingface")
    tokenizers = _child("tokenizers")
    tensorboard = _child("tensorboard")
    profiles = _child("profiles")
    profile_request = _child("profile.request")
    trackers = _child("trackers")

    @property
    def checkpoints(self) -> AnyPath:
        return self.path / "checkpoints"

    @property
    def elastic(self) -> AnyPath:
        return self.path / "elastic"

    @property
    def stacks_txt(self) -> AnyPath:
        return self.path / "stacks.txt"

    @property
    def location(self) -> AnyPath:
        """The directory that the user specified: `path`, or a folder in an object store."""
        return self.path

    def log_txt(self, process: int) -> Path:
        """Returns the file of a process's log: log.txt for the first process, then log.1.txt."""
        return self.path / (f"log.{process}.txt" if process else "log.txt")

    def decode_jsonl(self, dataset: str, step: int) -> Path:
        """Returns the file of a dataset's decoded outputs at the checkpoint of `step`."""
        return self.path / "decode" / dataset / f"{step}.jsonl"

    def eval_jsonl(self, dataset: str, step: int) -> Path:
        """Returns the file of a dataset's per-example eval outputs at the checkpoint of `step`."""
        return self.path / "eval" / dataset / f"{step}.jsonl"

    def shown(self, file: AnyPath) -> AnyPath:
        """Returns the path of one of the job's files under `location`.

        It is used in messages, and for files that several processes write.
        """
        return file

    def names(self) -> list[str]:
        """Returns the names of the files and folders in the directory."""
        return sorted(os.listdir(self.path))

    def upload(self) -> None:
        """Uploads files that have changed. Does nothing for a local directory."""

    def refresh(self) -> None:
        """Downloads files that have changed. Does nothing for a local directory."""

    def uploading(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that uploads changed files; see `Mirror.uploading`."""
        return contextlib.nullcontext()

    def locked(
        self, note: Callable[[str], None], *, is_shared: bool = False
    ) -> contextlib.AbstractContextManager[object]:
        """Returns a context manager that locks the directory for training; see `JobLock`.

        In an object store, the lock is a `Lease`, and this process changes no file of the job while
        another job may hold it. If there are several processes, the first one holds the lock.
        """
        if processes.is_first():
            return JobLock(self.path, note, is_shared=is_shared)
        return contextlib.nullcontext()

    def is_training(self) -> bool:
        """Returns whether a process is training in the directory."""
        return is_locked(self.path)

    def write_config(self, json_text: str, lines: Sequence[str]) -> None:
        """Writes `config.json` and `config.txt`, each atomically."""
        # Write config.json first, because it marks the directory as a job directory. If writing
        # config.txt fails, the next launch still accepts the directory.
        write_atomically(self.config_json, json_text.encode())
        write_atomically(self.config_txt, "".join(f"{line}\n" for line in lines).encode())


@dataclasses.dataclass(frozen=True)
class StoredJobDir(JobDir):
    """A job directory in an object store.

    Paths are those of local copies, except for checkpoints, `elastic` and `stacks_txt`.

    Attributes:
      mirror: The local copy, in `path`.
    """

    mirror: Mirror

    @property
    def checkpoints(self) -> StorePath:
        return self.mirror.store / "checkpoints"

    @property
    def elastic(self) -> StorePath:
        return dataclasses.replace(self.mirror.store / "elastic", is_quick=True)

    @property
    def stacks_txt(self) -> StorePath:
        # Without the guard, which would wait for the lease: a late report overwrites nothing.
        return dataclasses.replace(self.mirror.store / "stacks.txt", is_quick=True, guard=None)

    @property
    def location(self) -> StorePath:
        return self.mirror.store

    def shown(self, file: AnyPath) -> StorePath:
        if isinstance(file, StorePath):  # A checkpoint.
            return file
        return self.location / str(file.relative_to(self.path))

    def names(self) -> list[str]:
        return self.mirror.names()

    def upload(self) -> None:
        self.mirror.upload()

    def refresh(self) -> None:
        self.mirror.download()

    def uploading(self) -> contextlib.AbstractContextManager[None]:
        return self.mirror.uploading()

    @contextlib.contextmanager
    def locked(self, note: Callable[[str], None], *, is_shared: bool = False) -> Iterator[None]:
        store, kind = self.mirror.store, Lease if processes.is_first() else LeaseOfFirst
        with kind(store, processes.membership()) as lease:
            lease.token = processes.exchange("lease", lease.token)[0]
            # The previous holder may have written files since this process downloaded them.
            self.mirror.download(newest=True)
            # The paths of all files, including checkpoints, are below this path.
            self.mirror.store = dataclasses.replace(store, guard=lease.check)
            yield

    def is_training(self) -> bool:
        return is_leased(self.mirror.store)


def job_dir_at(path: str | os.PathLike[str], *, writes: bool = False) -> JobDir:
    """Returns a job directory without checking that it contains a job.

    Args:
      path: The directory, or the URL of a folder in an object store.
      writes: Whether files will be written, which is not possible on the Hugging Face Hub.

    Raises:
      ConfigError: The path is invalid, or the store cannot be used.
    """
    if is_hub_url(path) and writes:
        raise ConfigError(
            f"{os.fspath(path)} is on the Hugging Face Hub, where jobs are read-only; expected "
            "a local directory, or a gs:// or s3:// URL. Copy the job (`hf download`)."
        )
    if not is_store_url(path):
        return JobDir(local_directory(local_folder(path) if is_hub_url(path) else path))
    store = StorePath.opened(path, writes=writes)
    folder = temporary_folder() / store.name
    folder.mkdir()
    job = StoredJobDir(folder, Mirror(store, folder))
    if (store / job.config_json.name).is_file():  # Otherwise, the files do not belong to a job.
        job.mirror.download(newest=writes)
    return job


def open_for_training(path: str | os.PathLike[str], experiment: str) -> JobDir:
    """Opens a job directory for training, and creates it if needed.

    Args:
      path: The directory, which may be missing or empty, or may contain a job of `experiment`.
      experiment: Full name of the experiment, "module.Class".

    Raises:
      ConfigError: The path is a file, cannot be created or written to, or contains
        anything other than a job of this experiment.
    """
    job = open_for_supervisors(path)
    if job.config_json.is_file():
        recorded = recorded_experiment(job)
        if recorded != experiment:
            _refuse(
                job,
                f"contains a job of the experiment {shortened(recorded)}, but this run is "
                f"{experiment}. Choose a different directory, or use the experiment "
                f"{shortened(recorded)} to continue that job",
            )
    return job


def open_for_supervisors(path: str | os.PathLike[str]) -> JobDir:
    """Opens the directory of an elastic job for its supervisors, and creates it if needed.

    The first worker calls `open_for_training` later.

    Raises:
      ConfigError: The directory is invalid, as in `open_for_training`. The experiment is not
        checked.
    """
    job = job_dir_at(path, writes=True)
    if job.path.exists():
        _check_no_other_files(job)
    else:
        _make(job)
    _check_writable(job)
    return job


def _check_no_other_files(job: JobDir) -> None:
    """Checks that an existing directory contains a job, or only files left by a failed launch."""
    _check_is_directory(job)
    # A launch that failed before it created the job may have left a traceback or the log of another
    # process, and supervisors may have left their folder. Hidden files may belong to the desktop or
    # the network file system.
    ignored = (job.traceback_txt.name, job.elastic.name, job.elastic_jsonl.name)
    visible = sorted(
        name
        for name in job.names()
        if not (name.startswith(".") or name in ignored or fnmatch.fnmatch(name, "log.*.txt"))
    )
    if visible and not job.config_json.is_file():
        _refuse(
            job,
            f"contains {', '.join(visible[:3])}{', ...' if len(visible) > 3 else ''} but no "
            "config.json, so it is not a praxis_lite job. Choose a new or empty directory",
        )


def open_for_reading(path: str | os.PathLike[str], *, writes: bool = True) -> JobDir:
    """Opens the directory of a trained job, for example for evaluation.

    Args:
      path: The directory.
      writes: Whether results will be written to the directory.

    Raises:
      ConfigError: The path is a file, does not exist or contains no job, or `writes` is
        True and the directory cannot be written to.
    """
    job = job_dir_at(path, writes=writes)
    if not job.path.exists():
        nearest = next(parent for parent in job.path.parents if parent.exists())
        _refuse(
            job,
            f"does not exist (the nearest existing directory is {nearest}). Train the job first, "
            f"or use the directory of a trained job{_near_jobs(job)}",
        )
    _check_is_directory(job)
    if not job.config_json.is_file():
        _refuse(
            job,
            "has no config.json, so it contains no job. Train the job first, or use the directory "
            f"of a trained job{_near_jobs(job)}",
        )
    if writes:
        _check_writable(job)
    return job


def recorded_experiment(job: JobDir) -> str:
    """Returns the full name, "module.Class", of the experiment in a job's config.json.

    Raises:
      ConfigError: The file is damaged or was not written by praxis_lite.
    """
    try:
        experiment = read_json(job.config_json)["experiment"]
    except (ConfigError, LookupError, TypeError):
        experiment = None
    if not isinstance(experiment, str):
        _refuse(
            job,
            "has a config.json that is damaged or was not written by praxis_lite. Choose a "
            "different directory",
        )
    return experiment


def _near_jobs(job: JobDir) -> str:
    """Returns the last part of an error message, a list of jobs inside or next to a directory."""
    jobs_inside = _jobs_in(job.path)
    if jobs_inside:
        return f": {first_few([str(job.path / name) for name in jobs_inside])}"
    near = did_you_mean(job.path.name, _jobs_in(job.path.parent)).strip().rstrip("?")
    return f". {near}, in {job.path.parent}" if near else ""


def _jobs_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(
            name for name in os.listdir(folder) if JobDir(folder / name).config_json.is_file()
        )
    return []


def _make(job: JobDir) -> None:
    if job.path.is_symlink():
        _refuse(
            job,
            f"is a symbolic link to {os.readlink(job.path)}, which does not exist. Create "
            "that directory, or choose another",
        )
    try:
        job.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(
            job, f"cannot be created ({error.strerror}). Choose a directory that you can write to"
        )


def _check_is_directory(job: JobDir) -> None:
    if not job.path.is_dir():
        _refuse(job, "is a file. Choose a directory")


def _check_writable(job: JobDir) -> None:
    try:
        # Try to write, because permission bits do not reflect read-only mounts, quotas or root.
        with tempfile.TemporaryFile(dir=job.path):
            pass
    except OSError as error:
        _refuse(job, f"cannot be written ({error.strerror}). Choose another directory")


def _refuse(job: JobDir, reason: str) -> NoReturn:
    raise ConfigError(f"job_log_dir={job.location} {reason}.") from None
