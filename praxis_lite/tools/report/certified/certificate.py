"""The certificate of jobs: written as JSON with a digest over itself, and held against the jobs."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, require, shown
from praxis_lite.files.json_text import read_json
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.job.processes.same_everywhere import versions
from praxis_lite.tools.report.certified.facts import Fact, Reading, Scope, facts_of, scope_of

FORMAT = "praxis_lite certificate of jobs, 1"
SAME, DIFFERS, UNKNOWN = "same", "DIFFERS", "cannot be recomputed here"


@dataclasses.dataclass(frozen=True)
class CertifiedJob:
    """A job and what its certificate says.

    Attributes:
      name: the last part of its directory.
      path: of the directory, where it was certified.
    """

    name: str
    path: str
    scope: Scope
    facts: Sequence[Fact]

    @property
    def faults(self) -> list[str]:
        """Sentences on the faults of the job."""
        return [fault for fact in self.facts for fault in fact.faults]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The certificate of jobs.

    Attributes:
      written: when, in ISO 8601.
    """

    written: str
    jobs: Sequence[CertifiedJob]

    @property
    def faults(self) -> list[str]:
        """Sentences on the faults of any of the jobs."""
        return [f"{job.name}: {fault}" for job in self.jobs for fault in job.faults]

    def as_json(self) -> dict[str, Any]:
        """Serialises the certificate, with the SHA-256 of all else in it."""
        fields = {"format": FORMAT, "written": self.written}
        fields["jobs"] = json.loads(json.dumps([dataclasses.asdict(job) for job in self.jobs]))
        return {**fields, "sha256": _digest(fields)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A fact of a certificate, held against the job.

    Attributes:
      title: of the fact, with the job's name.
      verdict: SAME, DIFFERS or UNKNOWN.
      words: the two values, or why it cannot be told; "" if they are the same.
    """

    title: str
    verdict: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {self.verdict}" + (f": {self.words}" if self.words else "")


def certified(jobs: Mapping[str, JobDir], reading: Reading) -> Certificate:
    """Returns the certificate of jobs as they are now; raises ConfigError as `scope_of`."""
    made = []
    for name, job_dir in jobs.items():
        scope = scope_of(job_dir)
        made.append(
            CertifiedJob(name, str(job_dir.path), scope, facts_of(job_dir, scope, reading))
        )
    now = datetime.datetime.now(datetime.UTC)
    return Certificate(now.isoformat(timespec="seconds"), made)


def read_certificate(path: Path) -> tuple[Certificate, Verdict]:
    """Returns the certificate in a file, and whether its digest is that of its content.

    Raises:
      ConfigError: the file cannot be read, or holds no certificate.
    """
    try:
        fields = read_json(path)
        digest = fields.pop("sha256")
        require(fields["format"] == FORMAT, f"{path}: the format", fields["format"], FORMAT)
        certificate = Certificate(
            _text(fields["written"]), [_job(item) for item in _list(fields["jobs"])]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no certificate ({shown(str(error))}). --mode=certify JOB --json=FILE "
            "writes one."
        ) from None
    actual, title = _digest(fields), "the certificate's own digest"
    if actual == digest:
        return certificate, Verdict(title, SAME)
    return certificate, Verdict(title, DIFFERS, f"it says {_short(digest)}; {_short(actual)} here")


def verified(
    certificate: Certificate, jobs: Sequence[JobDir], reading: Reading
) -> list[Verdict]:
    """Returns a verdict on each fact.

    Args:
      jobs: in the order of the certificate.
    """
    verdicts = []
    for job, job_dir in zip(certificate.jobs, jobs, strict=True):
        here = {fact.title: fact for fact in facts_of(job_dir, job.scope, reading)}
        for fact in job.facts:
            verdicts.append(_verdict(job.name, fact, here.pop(fact.title, None)))
    return verdicts


def notes_on_versions(certificate: Certificate) -> list[str]:
    """Returns sentences on packages whose version here is not that of the jobs."""
    here, notes = versions(), []
    for job in certificate.jobs:
        used = next((fact.value for fact in job.facts if fact.section == "versions"), None) or []
        last = used[-1] if isinstance(used, list) and used else {}
        notes += [
            f"{job.name} used {name} {shown(str(last[name]))}; here is {version}"
            for name, version in here.items() if last.get(name, version) != version
        ]
    return notes


def _verdict(job: str, fact: Fact, here: Fact | None) -> Verdict:
    title = f"{job}: {fact.title}"
    if here is not None and set(here.faults) - set(fact.faults) and fact.value is None:
        return Verdict(title, DIFFERS, "; ".join(here.faults[:3]))
    if fact.value is None:
        same = here is not None and here.value is None and here.faults == fact.faults
        words = f"the certificate has none: {fact.why_not}"
        return Verdict(title, SAME if same and not fact.faults else UNKNOWN, words)
    if here is None:
        return Verdict(title, UNKNOWN, "this version knows no such fact")
    if here.value is None:
        faults = "; ".join(here.faults[:3])
        if here.faults:
            return Verdict(title, DIFFERS, f"{here.why_not}: {faults}")
        return Verdict(title, UNKNOWN, here.why_not)
    if here.value != fact.value:
        return Verdict(title, DIFFERS, _difference(fact.value, here.value))
    if here.faults != fact.faults:
        words = "; ".join(here.faults[:3]) or "here nothing is wrong"
        return Verdict(title, DIFFERS, words)
    return Verdict(title, SAME)


def _difference(before: Any, here: Any) -> str:
    if isinstance(before, dict) and isinstance(here, dict):
        names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
        return "; ".join(
            f"{name} {_short(before.get(name))}, here {_short(here.get(name))}" for name in names
        )
    return f"{_short(before)}, here {_short(here)}"


def _short(value: Any) -> str:
    return shown(value if isinstance(value, str) else json.dumps(value), 120)


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _job(item: Any) -> CertifiedJob:
    scope = item["scope"]
    return CertifiedJob(
        _text(item["name"]), _text(item["path"]),
        Scope(
            _number(scope["last_step"]), tuple(map(_number, _list(scope["checkpoints"]))),
            {_text(name): _number(size) for name, size in scope["sizes"].items()},
        ),
        [
            Fact(
                _text(fact["section"]), _text(fact["name"]), fact["value"],
                _text(fact["why_not"]), tuple(_text(fault) for fault in _list(fact["faults"])),
            )
            for fact in _list(item["facts"])
        ],
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.60} is no list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise TypeError(f"{value!r:.60} is no number")
    return value
