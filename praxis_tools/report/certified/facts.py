"""Computes the facts in a job's certificate, from the job's files and data."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.experiment.recorded_examples import (
    ExamplesProof,
    proof_of_examples,
    train_pipeline,
)
from praxis_lite.host.file_reading import content_of
from praxis_lite.job.examples.history import Segment
from praxis_lite.job.job_dir import JobDir, recorded_experiment
from praxis_lite.trainer.metrics.json_lines import json_line, strict_json
from praxis_tools.goodput.goodput import num_lost_steps
from praxis_tools.goodput.spans import read_spans
from praxis_tools.report.certified.job_files import (
    JobFiles,
    all_faults,
    digest_of_folder,
    faults_of_folder,
    faults_of_lines,
)
from praxis_tools.report.step_certificates import failed, step_certificates

_MAX_CHECKPOINTS = 3
# Append-only files. Only the part that existed when the job was certified is compared.
_GROWING = ("certificates.jsonl", "elastic.jsonl")
_FOLDERS = ("tokenizers/", "huggingface")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A fact about a job.

    Attributes:
      section: "config", "versions", "examples", "losses", "evaluations", "checkpoints",
        "tokenizers", "step certificates", "time" or "regroupings".
      name: Name of the fact within its section.
      value: JSON value, or None if it cannot be computed.
      why_not: The reason why the value cannot be computed, which is not necessarily a fault.
      faults: Descriptions of the problems with the job that this fact reveals.
    """

    section: str
    name: str
    value: Any
    why_not: str = ""
    faults: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The section and the name as one string."""
        return f"{self.section}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Scope:
    """The steps and files of a job that its certificate covers; training may continue afterwards.

    Attributes:
      last_step: The newest saved step.
      checkpoints: Steps whose checkpoints are covered.
      sizes: Maps the name of each append-only file to the number of bytes that are covered. For
        eval_metrics.jsonl, this is the number of lines up to the last step instead, because these
        steps may be evaluated again later. For folders, the value is 0.
    """

    last_step: int
    checkpoints: tuple[int, ...]
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Options for computing a job's facts.

    Attributes:
      packages: Packages that the config may reference, as in --packages.
      settings: Settings as in --set, for instance the current location of the data.
      recorded_only: Whether to skip reading the training data again.
      progress: Function called with a progress message while files are read.
    """

    packages: Sequence[str] = ()
    settings: Sequence[str] = ()
    recorded_only: bool = False
    progress: Callable[[str], None] = lambda text: None


def scope_of(job_dir: JobDir) -> Scope:
    """Returns the scope of the entire job. Raises ConfigError if the job has no checkpoint."""
    steps = steps_in(job_dir.checkpoints)
    if not (committed := steps.committed()):
        raise ConfigError(
            f"{job_dir.location} has no checkpoint to certify. Train until a step is saved."
        )
    # Unlike `committed`, this includes damaged checkpoints.
    newest = tuple(steps.numbered()[-_MAX_CHECKPOINTS:])
    sizes = {
        name: path.stat().st_size for name in _GROWING if (path := job_dir.path / name).is_file()
    }
    if job_dir.timeline_jsonl.is_file():
        sizes[job_dir.timeline_jsonl.name] = _closed_bytes(job_dir.timeline_jsonl)
    files = JobFiles(job_dir, committed[-1], committed[-1])
    if job_dir.eval_metrics_jsonl.is_file():
        with contextlib.suppress(ConfigError):  # The fact about this file reports the error.
            sizes[job_dir.eval_metrics_jsonl.name] = len(files.evaluations())
    sizes |= {name: 0 for name, _ in files.folders()}
    return Scope(committed[-1], newest, sizes)


def facts_of(job_dir: JobDir, scope: Scope, reading: Reading) -> list[Fact]:
    """Computes the facts that the certificate of a job covers."""
    proof, examples = _proof(job_dir, scope)
    newest = max([scope.last_step, *steps_in(job_dir.checkpoints).committed()])
    segments = proof.history.segments if proof is not None else ()
    starts = [segment.first_step - 1 for segment in segments]
    files = JobFiles(
        job_dir,
        scope.last_step,
        newest,
        reading.packages,
        first_step=min(starts, default=0),
        start=max(starts, default=scope.last_step),
    )
    timeline = job_dir.timeline_jsonl
    if proof is None and not files.has_trained:
        examples = [
            Fact(x.section, x.name, None, "the job has not completed a step") for x in examples
        ]
    return [
        _fact("config", "experiment", lambda: recorded_experiment(job_dir)),
        _fact(
            "config",
            "config.json",
            lambda: hashlib.sha256(content_of(job_dir.config_json)).hexdigest(),
            files.faults_of_config,
        ),
        _fact("config", "layout.json", files.layout, files.faults_of_layout),
        *examples,
        *([_recomputed_examples(job_dir, proof, reading)] if proof is not None else []),
        _fact("losses", "steps and losses", lambda: _losses(files), files.faults_of_metrics),
        _evaluations(files, scope),
        *_checkpoints(job_dir, scope, reading, newest),
        *_folders(files, scope),
        _certificates(files, scope),
        _fact("time", timeline.name, lambda: _beginning(timeline, scope), files.faults_of_timeline),
        _changes(files, scope, segments),
    ]


def _fact(
    section: str,
    name: str,
    value: Callable[[], Any],
    faults: Callable[[], Iterable[str]] = lambda: (),
    why_not: str = "the job has none",
) -> Fact:
    """Computes a fact, treating a file that cannot be read as a fault."""
    found = all_faults(faults)
    try:
        computed = value()
    except (Error, OSError) as error:
        fault = str(error.args[0] if isinstance(error, Error) else error)
        unique = tuple(dict.fromkeys([*found, fault]))
        return Fact(section, name, None, "it cannot be read", unique)
    return Fact(section, name, computed, why_not if computed is None else "", tuple(found))


def _proof(job_dir: JobDir, scope: Scope) -> tuple[ExamplesProof | None, list[Fact]]:
    """Returns the recorded history of examples, and the facts about versions and examples."""
    try:
        proof = proof_of_examples(
            job_dir,
            recorded_only=True,
            last_step=scope.last_step,
            num_lost_steps=num_lost_steps(job_dir),
        )
    except ConfigError as error:
        fault = str(error.args[0])
        return None, [
            Fact("versions", "by their first step", None, "there is no record", (fault,)),
            Fact("examples", "on record", None, "there is no record", (fault,)),
        ]
    return proof, [
        Fact("versions", "by their first step", _versions(proof.history.segments)),
        Fact(
            "examples",
            "on record",
            {
                "first_step": proof.history.first_step,
                "last_step": proof.history.last_step,
                "skipped_batches": list(proof.history.skipped),
                "digest": proof.history.digest,
            },
            faults=(*proof.faults, *_damaged_examples(job_dir)),
        ),
    ]


def _damaged_examples(job_dir: JobDir) -> list[str]:
    """Returns the faults in the recorded examples, ignoring lines truncated by a kill."""
    return [
        f"{job_dir.examples.name}/{fault}"
        for path in sorted(job_dir.examples.glob("*.jsonl"))
        for fault in all_faults(functools.partial(faults_of_lines, path, may_be_cut=True))
    ]


def _versions(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Returns the package versions at the start of the job, and after each version change."""
    changes: list[dict[str, Any]] = []
    for segment in segments:
        versions = dict(segment.starts[0].versions)
        if not changes or changes[-1] != {"from_step": changes[-1]["from_step"], **versions}:
            changes.append({"from_step": segment.first_step, **versions})
    return changes


def _recomputed_examples(job_dir: JobDir, proof: ExamplesProof, reading: Reading) -> Fact:
    """Reads the training data again and compares the digests with the recorded digests."""
    from praxis_lite.job.examples.proof import faults_of_data

    section, name = "examples", "recomputed"
    if reading.recorded_only:
        return Fact(section, name, None, "--recorded_only was given")

    def progress(num_done: int, num_steps: int) -> None:
        reading.progress(f"recomputed the examples of {num_done:,} of {num_steps:,} steps")

    try:
        pipeline = train_pipeline(job_dir, reading.packages, reading.settings)
        faults = faults_of_data(proof.history, pipeline, progress)
    except ConfigError as error:
        return Fact(section, name, None, str(error.args[0]))
    if faults:
        return Fact(section, name, None, "they differ from the record", tuple(faults))
    return Fact(section, name, {"digest": proof.history.digest})


def _losses(files: JobFiles) -> dict[str, Any]:
    lines = files.metrics()
    digest = hashlib.sha256("".join(map(json_line, lines)).encode()).hexdigest()
    last = strict_json(lines[-1]["loss"], "loss") if lines else None
    return {"num": len(lines), "last": last, "sha256": digest}


def _evaluations(files: JobFiles, scope: Scope) -> Fact:
    path = files.job_dir.eval_metrics_jsonl

    def value() -> dict[str, Any] | None:
        if path.name not in scope.sizes:
            return None
        if not path.is_file():
            raise ConfigError(f"{path.name} is missing")
        lines = files.evaluations()[: scope.sizes[path.name]]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        return {"num": len(lines), "sha256": digest}

    return _fact("evaluations", path.name, value, files.faults_of_evaluations)


def _checkpoints(job_dir: JobDir, scope: Scope, reading: Reading, newest: int) -> Iterator[Fact]:
    for step in scope.checkpoints:
        reading.progress(f"reading the checkpoint of step {step}")
        section, name, step_dir = "checkpoints", f"step {step}", job_dir.checkpoints / str(step)
        if not step_dir.is_dir() and newest > scope.last_step:
            # The job has continued and deleted older checkpoints.
            yield Fact(section, name, None, "the job has deleted this checkpoint")
            continue
        try:
            yield Fact(section, name, digest_of(step_dir))
        except (Error, OSError) as error:
            fault = f"the checkpoint of {name}: {error.args[0]}"
            yield Fact(section, name, None, "it is damaged", (fault,))


def _folders(files: JobFiles, scope: Scope) -> Iterator[Fact]:
    """Yields facts about the tokenizer copies and the initial model's files."""
    here = dict(files.folders())
    yield _fact(
        "tokenizers", "of the config", lambda: sorted(here) or None, files.faults_of_tokenizers
    )
    for name in sorted({*here, *(name for name in scope.sizes if name.startswith(_FOLDERS))}):
        path = files.job_dir.path / name
        yield _fact(
            "tokenizers",
            name,
            functools.partial(digest_of_folder, path),
            functools.partial(faults_of_folder, path),
        )


def _certificates(files: JobFiles, scope: Scope) -> Fact:
    path = files.job_dir.certificates_jsonl

    def faults() -> Iterator[str]:
        yield from files.faults_of_certificates()
        for item in failed(step_certificates(path)):
            if item.step <= scope.last_step:
                yield f"step {item.step} is not certified: {item.difference}"

    return _fact(
        "step certificates",
        path.name,
        lambda: _beginning(path, scope),
        faults,
        "the job has no step certificates (run.certify_every_steps)",
    )


def _changes(files: JobFiles, scope: Scope, segments: Sequence[Segment]) -> Fact:
    path = files.job_dir.elastic_jsonl

    def faults() -> Iterator[str]:
        if path.exists():
            yield from faults_of_lines(path)
        elif any(segment.starts[0].generation is not None for segment in segments):
            yield f"{path.name} is missing, although the job is elastic"

    return _fact(
        "regroupings",
        path.name,
        lambda: _beginning(path, scope),
        faults,
        "the job is not elastic",
    )


def _beginning(path: Path, scope: Scope) -> dict[str, Any] | None:
    """Returns the digest of the covered bytes of a file, or None if the file did not exist."""
    if path.name not in scope.sizes:
        return None
    content = content_of(path)[: scope.sizes[path.name]]
    return {
        "lines": content.count(b"\n"),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _closed_bytes(path: Path) -> int:
    """Returns the size of a timeline in bytes, excluding the last line if it may be rewritten."""
    lines = content_of(path).splitlines(keepends=True)
    if lines and (spans := read_spans(path)) and spans[-1].ended_by is None:
        lines = lines[:-1]
    return sum(map(len, lines))
