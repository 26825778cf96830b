"""Where a job keeps its files, and whose directory it is."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from praxis_lite.core.errors import ConfigError, did_you_mean, few, shown
from praxis_lite.host.file_reading import read_json
from praxis_lite.host.whole_files import write_whole
from praxis_lite.job.local_directory import local_directory

__all__ = ("JobDir", "open_for_meeting", "open_for_reading", "recorded_experiment")

# The dataset's name in decode/ of what a command line asks for with --prompt and --prompts.
COMMAND_LINE = "command_line"


def _below(name: str) -> property:
    return property(lambda self: self.path / name)


@dataclasses.dataclass(frozen=True)
class JobDir:
    """The files of a job, below `path`. Naming them touches no disk.

    Attributes:
      config_json: the config from which the job is rebuilt; it makes the directory a job's.
      config_txt: the same config for people: one `path=value` per line.
      layout_txt: every weight's shapes, spec, bytes per device and padding.
      layout_json: the same as data, for programs.
      init_from_checkpoint_txt: where each variable of a new job came from, if it was not drawn.
      metrics_jsonl: a line per training step.
      eval_metrics_jsonl: a line per dataset and evaluation.
      certificates_jsonl: a line per certificate in flight (run.certify_every_steps).
      timeline_jsonl: what each launch spent its time on, a line per save.
      examples: the folder of lines on the rows that each process fed.
      loss_curve_png: the losses as a picture.
      non_finite_txt: where NaN and infinities came from, for each step that run.debug_nans
        repeated.
      residuals_jsonl: a line per profile and --mode=plan --measure: measured and predicted seconds.
      elastic_jsonl: a line for each time that processes of an elastic job died, left or came.
      elastic: the folder in which the supervisors of an elastic job meet.
      stacks_txt: what every thread was doing, each time that no step ended for long.
      traceback_txt: the traceback of the exception that ended the last launch, if one did.
      huggingface: the folder with config.json and tokenizer of the model of Hugging Face that the
        job began with, if it did.
      tokenizers: the folder of copies of the tokenizers that the config names.
      tensorboard: the folder of TensorBoard's summaries.
      profiles: the folder of profiles, each by the first step that it traces.
      profile_request: a file that asks for a profile; its text may give the number of steps.
      trackers: the folder of the run's id.
      checkpoints: the folder of checkpoints by step.
      beginning: a mark, there while a command begins the job with weights of another system.
    """

    path: Path

    config_json = _below("config.json")
    config_txt = _below("config.txt")
    layout_txt = _below("layout.txt")
    layout_json = _below("layout.json")
    init_from_checkpoint_txt = _below("init_from_checkpoint.txt")
    metrics_jsonl = _below("metrics.jsonl")
    eval_metrics_jsonl = _below("eval_metrics.jsonl")
    certificates_jsonl = _below("certificates.jsonl")
    timeline_jsonl = _below("timeline.jsonl")
    examples = _below("examples")
    loss_curve_png = _below("loss_curve.png")
    non_finite_txt = _below("non_finite.txt")
    residuals_jsonl = _below("residuals.jsonl")
    elastic_jsonl = _below("elastic.jsonl")
    elastic = _below("elastic")
    stacks_txt = _below("stacks.txt")
    traceback_txt = _below("traceback.txt")
    huggingface = _below("huggingface")
    tokenizers = _below("tokenizers")
    tensorboard = _below("tensorboard")
    profiles = _below("profiles")
    profile_request = _below("profile.request")
    trackers = _below("trackers")
    checkpoints = _below("checkpoints")

    def decode_jsonl(self, dataset: str, step: int) -> Path:
        """Returns the file of a dataset's prompts as decoded by the checkpoint of `step`."""
        return self.path / "decode" / dataset / f"{step}.jsonl"

    def eval_jsonl(self, dataset: str, step: int) -> Path:
        """Returns the file of what that checkpoint's evaluation found for each row of a dataset."""
        return self.path / "eval" / dataset / f"{step}.jsonl"

    def write_config(self, json_text: str, lines: Sequence[str]) -> None:
        """Writes `config.json` and `config.txt`; a reader sees the old files or the new."""
        # config.json first: it makes the directory a job's, which the next launch takes even if the
        # disk is full now. Alone, config.txt would be taken for a file of something else.
        write_whole(self.config_json, json_text.encode())
        write_whole(self.config_txt, "".join(f"{line}\n" for line in lines).encode())


def open_for_training(path: str | os.PathLike[str], experiment: str) -> JobDir:
    """Returns the job's directory, new and empty or begun by `experiment` (module.Class).

    It is made if it is absent. Raises ConfigError if it is an address or a file, cannot be made or
    written, or holds something else than this experiment's job.
    """
    job = open_for_meeting(path)
    if job.config_json.is_file():
        result = recorded_experiment(job)
        if result != experiment:
            _refuse(
                job,
                f"belongs to the experiment {shown(result)}, and this run is {experiment}. Name "
                f"another directory, or launch --exp={shown(result)} to go on with that job",
            )
    return job


def open_for_meeting(path: str | os.PathLike[str]) -> JobDir:
    """Returns the directory that is or becomes an elastic job's, for its supervisors to meet in.

    It is made if it is absent. Raises ConfigError as `open_for_training`, which the first worker
    calls.
    """
    job = JobDir(local_directory(path))
    if job.path.exists():
        _check_may_be_jobs(job)
    else:
        _make(job)
    _check_writable(job)
    return job


def _check_may_be_jobs(job: JobDir) -> None:
    """Checks that a directory that exists is a job's, or may become a job's."""
    _check_is_directory(job)
    # Hidden files are of the desktop or the network file system. A traceback is of a launch
    # that failed before it began the job; the folder `elastic` of its supervisors.
    before = (job.traceback_txt.name, job.elastic.name, job.elastic_jsonl.name)
    visible = sorted(
        name for name in os.listdir(job.path)
        if not name.startswith(".") and name not in before
    )
    if visible and not job.config_json.is_file():
        _refuse(
            job,
            f"holds {', '.join(visible[:3])}{', ...' if len(visible) > 3 else ''} but no "
            "config.json, so it is not a job of praxis_lite. Name a new or an empty directory",
        )


def open_for_reading(path: str | os.PathLike[str], *, writes: bool = True) -> JobDir:
    """Returns the directory of a job that was trained before, for evaluation or decoding.

    Raises ConfigError if it is an address, absent, a file or no job's; or, if results are to be
    written into it (`writes`), cannot be written.
    """
    job = JobDir(local_directory(path))
    if not job.path.exists():
        near = next(parent for parent in job.path.parents if parent.exists())
        _refuse(
            job,
            f"does not exist (the nearest that does is {near}). Train first with "
            f"--mode=train, or name the directory of a job that was trained{_near_jobs(job)}",
        )
    _check_is_directory(job)
    if not job.config_json.is_file():
        _refuse(
            job,
            "has no config.json, so no job was trained there. Train first with --mode=train, or "
            f"name the directory of a job that was trained{_near_jobs(job)}",
        )
    if writes:
        _check_writable(job)
    return job


def recorded_experiment(job: JobDir) -> str:
    """Returns the full name of the experiment that `config.json` records.

    Raises ConfigError if praxis_lite did not write the file.
    """
    try:
        result = read_json(job.config_json)["experiment"]
    except (ConfigError, LookupError, TypeError):
        result = None
    if not isinstance(result, str):
        _refuse(
            job,
            "has a config.json that praxis_lite did not write, or that is damaged. Name another "
            "directory",
        )
    return result


def _near_jobs(job: JobDir) -> str:
    """Returns the end of a message: jobs in the directory, or next to it with a similar name."""
    inside = _jobs_in(job.path)
    if inside:
        return f": {few([str(job.path / name) for name in inside])}"
    near = did_you_mean(job.path.name, _jobs_in(job.path.parent)).strip().rstrip("?")
    return f". {near}, in {job.path.parent}" if near else ""


def _jobs_in(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(
            name for name in os.listdir(directory)
            if JobDir(directory / name).config_json.is_file()
        )
    return []


def _make(job: JobDir) -> None:
    if job.path.is_symlink():
        _refuse(job, f"is a symbolic link to {os.readlink(job.path)}, which is not there. Make "
                     "that directory, or name another")
    try:
        job.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(
            job, f"cannot be made ({error.strerror}). Name one below a directory you can write"
        )


def _check_is_directory(job: JobDir) -> None:
    if not job.path.is_dir():
        _refuse(job, "is a file. Name a directory")


def _check_writable(job: JobDir) -> None:
    try:
        # Only writing tells: permission bits say nothing of read-only mounts, quotas or root.
        with tempfile.TemporaryFile(dir=job.path):
            pass
    except OSError as error:
        _refuse(job, f"cannot be written ({error.strerror}). Name one that you can write")


def _refuse(job: JobDir, reason: str) -> NoReturn:
    raise ConfigError(f"--job_log_dir={job.path} {reason}.") from None
