"""Where a job keeps its files, and whose directory it is."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from praxis_lite.config.former_names import experiment_today
from praxis_lite.config.json_text import read_json
from praxis_lite.errors import ConfigError, shown
from praxis_lite.job.whole_files import write_whole


@dataclasses.dataclass(frozen=True)
class JobDir:
    """The files of one job, below `path`. Naming them touches no disk."""

    path: Path

    @property
    def config_json(self) -> Path:
        """The config from which the job is rebuilt; makes the directory a job's."""
        return self.path / "config.json"

    @property
    def config_txt(self) -> Path:
        """The same config for people: one `path=value` per line."""
        return self.path / "config.txt"

    @property
    def layout_txt(self) -> Path:
        """Every weight: shapes, spec, bytes per device, padding."""
        return self.path / "layout.txt"

    @property
    def init_from_checkpoint_txt(self) -> Path:
        """Where each variable of a new job came from, if not drawn."""
        return self.path / "init_from_checkpoint.txt"

    @property
    def metrics_jsonl(self) -> Path:
        """One line per training step."""
        return self.path / "metrics.jsonl"

    @property
    def eval_metrics_jsonl(self) -> Path:
        """One line per dataset and evaluation."""
        return self.path / "eval_metrics.jsonl"

    @property
    def loss_curve_png(self) -> Path:
        """The losses as a picture."""
        return self.path / "loss_curve.png"

    @property
    def non_finite_txt(self) -> Path:
        """Where NaN and infinities came from, of each step that run.debug_nans ran again."""
        return self.path / "non_finite.txt"

    @property
    def stacks_txt(self) -> Path:
        """What every thread was doing, each time that no step ended for long."""
        return self.path / "stacks.txt"

    @property
    def traceback_txt(self) -> Path:
        """The traceback of the exception that ended the last launch, if one did."""
        return self.path / "traceback.txt"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's summaries."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by step."""
        return self.path / "checkpoints"

    def decode_dir(self, dataset: str) -> Path:
        """What was decoded from one dataset, a file per checkpoint."""
        return self.path / "decode" / dataset

    def decode_jsonl(self, dataset: str, step: int) -> Path:
        """What the checkpoint of `step` made of one dataset's prompts."""
        return self.decode_dir(dataset) / f"{step}.jsonl"

    def eval_jsonl(self, dataset: str, step: int) -> Path:
        """What --mode=eval found for each row of a dataset with the checkpoint of `step`."""
        return self.path / "eval" / dataset / f"{step}.jsonl"

    def write_config(self, json_text: str, lines: Sequence[str]) -> None:
        """Writes `config.json` and `config.txt`; a reader sees the old files or the new."""
        # config.json last: where it stands, the directory is complete.
        write_whole(self.config_txt, "".join(f"{line}\n" for line in lines).encode())
        write_whole(self.config_json, json_text.encode())


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path, "~" expanded.

    Raises:
        ConfigError: it is an address such as gs://bucket/job, of which Python would make a local
            directory called "gs:".
    """
    # One slash is enough: a Path has no two in a row.
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", os.fspath(path)):
        advice = (
            "Leave out file://"
            if scheme[1].lower() == "file"
            else "Mount it, or name a directory of this machine or of a file system that all its "
            "hosts share"
        )
        raise ConfigError(
            f"{shown(os.fspath(path))} is an address ({scheme[1]}), but jobs and checkpoints are "
            f"kept in, and read from, only local directories; object stores (gs, s3) are not "
            f"supported. {advice}."
        )
    return Path(path).expanduser().absolute()


def open_for_training(path: str | os.PathLike[str], experiment: str) -> JobDir:
    """Returns the job's directory, new and empty or one that `experiment` began.

    Args:
        path: made if absent, with its parents.
        experiment: the full name, `module.Class`.

    Raises:
        ConfigError: it is an address, cannot be made or written, is a file, holds other things
            than a job, or the job of another experiment.
    """
    job = _named(path)
    if job.path.exists():
        _check_is_directory(job)
        # Hidden files are the desktop's and the network file system's, no one's work. A traceback
        # is of a launch that failed before it began the job.
        visible = sorted(name for name in os.listdir(job.path) if not name.startswith("."))
        visible = [name for name in visible if name != job.traceback_txt.name]
        if job.config_json.is_dir():
            _refuse(job, "has a directory config.json, so it is no job's. Name another")
        if visible and not job.config_json.is_file():
            _refuse(
                job,
                f"holds {', '.join(visible[:3])}{', ...' if len(visible) > 3 else ''} but no "
                "config.json, so it is no job of praxis_lite. Name a new or an empty directory",
            )
    else:
        try:
            job.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _refuse(
                job, f"cannot be made ({error.strerror}). Name one below a directory you can write"
            )
    _check_writable(job)
    if job.config_json.is_file():
        found = recorded_experiment(job, packages=experiment.split(".")[:1])
        if found != experiment:
            _refuse(
                job,
                f"belongs to the experiment {shown(found)}, and this run is {experiment}. Name "
                f"another directory, or launch --exp={shown(found)} to go on with that job",
            )
    return job


def open_for_reading(path: str | os.PathLike[str], *, writes: bool = True) -> JobDir:
    """Returns the directory of a job that was trained before, for evaluation or decoding.

    Args:
        path: the directory.
        writes: whether results will be written into it.

    Raises:
        ConfigError: it is an address, absent, a file, no job's, or cannot be written.
    """
    job = _named(path)
    if not job.path.exists():
        near = _nearest_existing(job.path)
        _refuse(
            job,
            f"does not exist (the nearest that does is {near}). Train first with "
            "--mode=train, or name the directory of a job that was trained",
        )
    _check_is_directory(job)
    if not job.config_json.is_file():
        _refuse(
            job,
            "has no config.json, so no job was trained there. Train first with --mode=train, or "
            "name the directory of a job that was trained",
        )
    if writes:
        _check_writable(job)
    return job


def recorded_experiment(job: JobDir, packages: Sequence[str]) -> str:
    """Returns the full name of the experiment that `config.json` records, as it is called today.

    Args:
        job: has a config.json.
        packages: of the user's own.

    Raises:
        ConfigError: the file is not one of praxis_lite's.
    """
    try:
        config = read_json(job.config_json)
        found, config_format = config["experiment"], config.get("format")
    except (ConfigError, LookupError, TypeError, AttributeError):
        found = None
    if not isinstance(found, str):
        _refuse(
            job,
            "has a config.json that praxis_lite did not write, or that is damaged. Name another "
            "directory",
        )
    return experiment_today(found, config_format, packages)


def _named(path: str | os.PathLike[str]) -> JobDir:
    if not os.fspath(path):
        raise ConfigError(
            "--job_log_dir is empty, as where a variable of the shell is not set. Name a directory."
        )
    job = JobDir(local_directory(path))
    try:
        job.path.exists()
    except (OSError, ValueError) as error:  # Too long, or of characters that no path has.
        raise ConfigError(
            f"--job_log_dir={shown(os.fspath(path))} is no path "
            f"({getattr(error, 'strerror', error)}). Name another directory."
        ) from None
    return job


def _check_is_directory(job: JobDir) -> None:
    if not job.path.is_dir():
        _refuse(job, "is a file. Name a directory")


def _check_writable(job: JobDir) -> None:
    try:
        # Asking the file system is the only sure way: permission bits say nothing of read-only
        # mounts, quotas or a root user.
        with tempfile.TemporaryFile(dir=job.path):
            pass
    except OSError as error:
        _refuse(job, f"cannot be written ({error.strerror}). Name one that you can write")


def _nearest_existing(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.exists()), Path(path.anchor))


def _refuse(job: JobDir, reason: str) -> NoReturn:
    raise ConfigError(f"--job_log_dir={job.path} {reason}.") from None
