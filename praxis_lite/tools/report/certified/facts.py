"""The facts that certify a job: each a value that whoever has the job's files can make again."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import opened
from praxis_lite.run.checkpoints.digest import digest_of
from praxis_lite.run.checkpoints.steps.step_dirs import committed_steps
from praxis_lite.run.experiment.recorded_examples import (
    ExamplesProof,
    proof_of_examples,
    train_pipeline,
)
from praxis_lite.run.job.examples.history import Part
from praxis_lite.run.job.job_dir import JobDir, recorded_experiment
from praxis_lite.run.trainer.metrics.json_lines import each_training_line, strict_json
from praxis_lite.tools.report.certificates import certificates_of, failed

_MOST_CHECKPOINTS = 3
# Files to which a job only adds: of one that went on, the beginning is compared.
_GROWING = ("certificates.jsonl", "elastic.jsonl")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A fact of a job.

    Attributes:
      section: "config", "versions", "examples", "losses", "checkpoints", "certificates in flight"
        or "changes of hands".
      name: within its section.
      value: for JSON; None: it cannot be made.
      why_not: why it cannot, in words.
      faults: sentences on what is wrong with the job by this fact.
    """

    section: str
    name: str
    value: Any
    why_not: str = ""
    faults: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The section and the name."""
        return f"{self.section}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Scope:
    """The part of a job that its certificate is about; the job may go on.

    Attributes:
      last_step: the newest that is saved.
      checkpoints: the steps whose digests are taken.
      sizes: bytes of the files that grow, by name.
    """

    last_step: int
    checkpoints: tuple[int, ...]
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a job's facts are made.

    Attributes:
      packages, settings: as for --packages and --set, such as where the data are now.
      recorded_only: True: the data are not made again.
      progress: told in words what is looked at.
    """

    packages: Sequence[str] = ()
    settings: Sequence[str] = ()
    recorded_only: bool = False
    progress: Callable[[str], None] = lambda words: None


def scope_of(job_dir: JobDir) -> Scope:
    """Returns the whole of a job as it is now; raises ConfigError if nothing of it is saved."""
    steps = committed_steps(job_dir.checkpoints) if job_dir.checkpoints.is_dir() else []
    if not steps:
        raise ConfigError(
            f"{job_dir.path} has no checkpoint, so there is nothing to certify. Train until a step "
            "is saved."
        )
    sizes = {
        name: path.stat().st_size for name in _GROWING
        if (path := job_dir.path / name).is_file()
    }
    return Scope(steps[-1], tuple(steps[-_MOST_CHECKPOINTS:]), sizes)


def facts_of(job_dir: JobDir, scope: Scope, reading: Reading) -> list[Fact]:
    """Returns the facts of a job within a scope, in their order."""
    return [
        _fact("config", "experiment", lambda: recorded_experiment(job_dir)),
        _fact("config", "config.json", lambda: _sha256(job_dir.config_json)),
        *_examples(job_dir, scope, reading),
        _fact("losses", "steps and losses", lambda: _losses(job_dir, scope)),
        *_checkpoints(job_dir, scope, reading),
        _certificates(job_dir, scope),
        _changes(job_dir, scope),
    ]


def _fact(section: str, name: str, value: Callable[[], Any], faults: Sequence[str] = ()) -> Fact:
    try:
        return Fact(section, name, value(), faults=tuple(faults))
    except ConfigError as error:
        return Fact(section, name, None, str(error.args[0]), tuple(faults))
    except OSError as error:
        return Fact(section, name, None, str(error), tuple(faults))


def _examples(job_dir: JobDir, scope: Scope, reading: Reading) -> Iterator[Fact]:
    """Yields the versions that fed the job, and its examples: on record, and made again."""
    try:
        proof = proof_of_examples(job_dir, recorded_only=True, last_step=scope.last_step)
    except ConfigError as error:
        yield Fact("versions", "by their first step", None, str(error.args[0]))
        yield Fact("examples", "on record", None, str(error.args[0]))
        return
    yield Fact("versions", "by their first step", _versions(proof.history.parts))
    yield Fact("examples", "on record", {
        "first_step": proof.history.first_step, "last_step": proof.history.last_step,
        "rows": proof.history.num_rows, "left_out_batches": list(proof.history.skipped),
        "digest": proof.history.digest,
    }, faults=tuple(proof.faults))
    yield _examples_again(job_dir, proof, reading)


def _versions(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the versions of packages, once and again whenever they changed."""
    result: list[dict[str, Any]] = []
    for part in parts:
        versions = dict(part.starts[0].versions)
        if not result or result[-1] != {"from_step": result[-1]["from_step"], **versions}:
            result.append({"from_step": part.first_step, **versions})
    return result


def _examples_again(job_dir: JobDir, proof: ExamplesProof, reading: Reading) -> Fact:
    from praxis_lite.run.job.examples.proof import faults_of_data

    section, name = "examples", "made again"
    if reading.recorded_only:
        return Fact(section, name, None, "--recorded_only was given")

    def progress(done: int, of: int) -> None:
        reading.progress(f"{done:,} of {of:,} steps' examples made again")

    try:
        pipeline = train_pipeline(job_dir, reading.packages, reading.settings)
        faults = faults_of_data(proof.history, pipeline, progress)
    except ConfigError as error:
        return Fact(section, name, None, str(error.args[0]))
    if faults:
        return Fact(section, name, None, "they are others than those on record", tuple(faults))
    return Fact(section, name, {"digest": proof.history.digest})


def _losses(job_dir: JobDir, scope: Scope) -> dict[str, Any]:
    lines = [
        [line["step"], strict_json(line["loss"], "loss")]
        for line in each_training_line(job_dir.metrics_jsonl) if line["step"] <= scope.last_step
    ]
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    return {"num": len(lines), "last": lines[-1][1] if lines else None, "sha256": digest}


def _checkpoints(job_dir: JobDir, scope: Scope, reading: Reading) -> Iterator[Fact]:
    for step in scope.checkpoints:
        reading.progress(f"reading the checkpoint of step {step}")
        section, name, step_dir = "checkpoints", f"step {step}", job_dir.checkpoints / str(step)
        if not step_dir.is_dir():
            yield Fact(section, name, None, "it is no longer kept")
            continue
        try:
            yield Fact(section, name, digest_of(step_dir))
        except ConfigError as error:
            fault = f"the checkpoint of {name}: {error.args[0]}"
            yield Fact(section, name, None, "it is damaged", (fault,))


def _certificates(job_dir: JobDir, scope: Scope) -> Fact:
    section, path = "certificates in flight", job_dir.certificates_jsonl
    if path.name not in scope.sizes:
        return Fact(section, path.name, None, "the job made none (run.certify_every_steps)")
    wrong = [item for item in failed(certificates_of(path)) if item.step <= scope.last_step]
    return _fact(
        section, path.name, lambda: _beginning(path, scope),
        [f"step {item.step} is not certified: {item.difference}" for item in wrong],
    )


def _changes(job_dir: JobDir, scope: Scope) -> Fact:
    section, path = "changes of hands", job_dir.elastic_jsonl
    if path.name not in scope.sizes:
        return Fact(section, path.name, None, "the job is not elastic")
    return _fact(section, path.name, lambda: _beginning(path, scope))


def _beginning(path: Path, scope: Scope) -> dict[str, Any]:
    with opened(path) as file:
        content = file.read(scope.sizes[path.name])
    return {
        "lines": content.count(b"\n"), "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.sha256(file.read()).hexdigest()
