"""Creates job certificates in JSON with a digest, and verifies them against the jobs."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, require, shortened
from praxis_lite.host.file_reading import read_json
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.same_everywhere import versions
from praxis_tools.report.certified.facts import Fact, Reading, Scope, facts_of, scope_of

FORMAT = "praxis_lite certificate of jobs, 1"
SAME, DIFFERS, UNKNOWN = "same", "DIFFERS", "cannot be recomputed here"


@dataclasses.dataclass(frozen=True)
class CertifiedJob:
    """A job with its certified facts.

    Attributes:
      name: Name of the job directory.
      path: Path that the job directory had when the job was certified.
      scope: The steps and files that the certificate covers.
      facts: The certified facts.
    """

    name: str
    path: str
    scope: Scope
    facts: Sequence[Fact]

    @property
    def faults(self) -> list[str]:
        """Descriptions of problems with the job."""
        return [fault for fact in self.facts for fault in fact.faults]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A certificate of one or more jobs.

    Attributes:
      written: Time of creation, in ISO 8601.
      jobs: The certified jobs.
    """

    written: str
    jobs: Sequence[CertifiedJob]

    @property
    def faults(self) -> list[str]:
        """Descriptions of problems with any of the jobs."""
        return [f"{job.name}: {fault}" for job in self.jobs for fault in job.faults]

    def as_json(self) -> dict[str, Any]:
        """Returns the certificate as JSON values, with a SHA-256 digest of the other fields."""
        fields = {"format": FORMAT, "written": self.written}
        fields["jobs"] = json.loads(json.dumps([dataclasses.asdict(job) for job in self.jobs]))
        return {**fields, "sha256": _digest(fields)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a certified fact with the job.

    Attributes:
      title: Job name and title of the fact.
      verdict: SAME, DIFFERS or UNKNOWN.
      details: The two values, or the reason why the values cannot be compared; "" if the values are
        equal.
    """

    title: str
    verdict: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {self.verdict}" + (f": {self.details}" if self.details else "")


def certify_jobs(jobs: Mapping[str, JobDir], reading: Reading) -> Certificate:
    """Certifies the current state of jobs. Raises ConfigError if a job has no checkpoint."""
    certified_jobs = []
    for name, job_dir in jobs.items():
        scope = scope_of(job_dir)
        facts = facts_of(job_dir, scope, reading)
        certified_jobs.append(CertifiedJob(name, str(job_dir.location), scope, facts))
    now = datetime.datetime.now(datetime.UTC)
    return Certificate(now.isoformat(timespec="seconds"), certified_jobs)


def read_certificate(path: Path) -> tuple[Certificate, Verdict]:
    """Reads a certificate and checks its digest.

    Raises:
      ConfigError: The file cannot be read or is not a certificate.
    """
    try:
        fields = read_json(path)
        digest = fields.pop("sha256")
        require(fields["format"] == FORMAT, f"{path}: the format", fields["format"], FORMAT)
        certificate = Certificate(fields["written"], [_job(job) for job in fields["jobs"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a certificate ({shortened(str(error))}). Create one with "
            "`praxis certify JOB --json=FILE`."
        ) from None
    actual, title = _digest(fields), "the certificate's own digest"
    if actual == digest:
        return certificate, Verdict(title, SAME)
    return certificate, Verdict(title, DIFFERS, f"recorded {_short(digest)}, here {_short(actual)}")


def verify_certificate(
    certificate: Certificate, jobs: Sequence[JobDir], reading: Reading
) -> list[Verdict]:
    """Recomputes the facts in a certificate and returns a verdict on each fact.

    Args:
      certificate: The certificate to verify.
      jobs: Job directories, in the order of the certificate.
      reading: Options for recomputing the facts.
    """
    verdicts = []
    for job, job_dir in zip(certificate.jobs, jobs, strict=True):
        recomputed = {fact.title: fact for fact in facts_of(job_dir, job.scope, reading)}
        for fact in job.facts:
            verdicts.append(_verdict(job.name, fact, recomputed.pop(fact.title, None)))
    return verdicts


def notes_on_versions(certificate: Certificate) -> list[str]:
    """Returns a note for each package whose installed version differs from the version in a job."""
    here, notes = versions(), []
    for job in certificate.jobs:
        used = next((fact.value for fact in job.facts if fact.section == "versions"), None) or []
        last = used[-1] if used else {}
        notes += [
            f"{job.name} used {name} {shortened(str(last[name]))}, but {version} is installed here"
            for name, version in here.items()
            if last.get(name, version) != version
        ]
    return notes


def _verdict(job: str, fact: Fact, here: Fact | None) -> Verdict:
    """Compares a certified fact with the same fact recomputed here.

    A value that cannot be computed is not a difference, unless new faults explain why.
    """
    title = f"{job}: {fact.title}"
    if here is None:
        return Verdict(title, UNKNOWN, "this version of praxis_lite does not compute it")
    faults = "; ".join(here.faults[:3])
    if fact.value is None:
        if set(here.faults) - set(fact.faults):
            return Verdict(title, DIFFERS, faults)
        is_same = here.value is None and not fact.faults
        text = f"the certificate has no value: {fact.why_not}"
        return Verdict(title, SAME if is_same else UNKNOWN, text)
    if here.value is None:
        if faults:
            return Verdict(title, DIFFERS, f"{here.why_not}: {faults}")
        return Verdict(title, UNKNOWN, here.why_not)
    if here.value != fact.value:
        return Verdict(title, DIFFERS, _difference(fact.value, here.value))
    # The values are equal, but one side has found faults that the other has not.
    if here.faults != fact.faults:
        return Verdict(title, DIFFERS, faults or "the recorded fault no longer exists")
    return Verdict(title, SAME)


def _difference(before: Any, here: Any) -> str:
    if isinstance(before, dict) and isinstance(here, dict):
        names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
        return "; ".join(
            f"{name} {_short(before.get(name))}, here {_short(here.get(name))}" for name in names
        )
    return f"{_short(before)}, here {_short(here)}"


def _short(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value), 120)


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _job(fields: Mapping[str, Any]) -> CertifiedJob:
    facts = [Fact(**{**fact, "faults": tuple(fact["faults"])}) for fact in fields["facts"]]
    return CertifiedJob(fields["name"], fields["path"], Scope(**fields["scope"]), facts)
