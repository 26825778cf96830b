"""Reads the certificates of training steps from certificates.jsonl."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import shortened
from praxis_lite.host.file_reading import lines_of, parse_json
from praxis_lite.trainer.metrics.json_lines import is_step


@dataclasses.dataclass(frozen=True)
class StepCertificate:
    """The result of recomputing a training step and comparing it with the original.

    Attributes:
      step: The certified step.
      num_comparisons: Number of comparisons.
      closest: The array whose difference is closest to its tolerance, and the difference divided
        by the tolerance; None if unknown.
      difference: Description of the difference, or "" if there is no difference.
    """

    step: int
    num_comparisons: int
    closest: tuple[str, float] | None
    difference: str


def step_certificates(path: Path) -> list[StepCertificate]:
    """Reads the certificates in a file, in file order, including certificates of lost steps.

    Damaged lines are skipped. Returns an empty list if the file does not exist, and raises
    ConfigError if the file cannot be read.
    """
    read = map(_step_certificate, lines_of(path))
    return [certificate for certificate in read if certificate is not None]


def failed(certificates: Sequence[StepCertificate]) -> list[StepCertificate]:
    """Returns the certificates that report a difference."""
    return [certificate for certificate in certificates if certificate.difference]


def summary(certificates: Sequence[StepCertificate]) -> str:
    """Summarizes a non-empty list of certificates in one line."""
    num_failed = len(failed(certificates))
    number = sum(certificate.num_comparisons for certificate in certificates)
    known = [certificate.closest for certificate in certificates if certificate.closest]
    nearest = ""
    if known:
        leaf, share = max(known, key=lambda closest: closest[1])
        nearest = f"; largest difference: {leaf}, {share:.1%} of its tolerance"
    result = f"{num_failed or 'none'} found a difference"
    plural = "s" * (len(certificates) > 1)
    return f"{len(certificates)} certificate{plural} of {number:,} comparisons, {result}{nearest}"


def _step_certificate(text: str) -> StepCertificate | None:
    try:
        line = parse_json(text)
        if not is_step(line["step"]):
            return None
        closest = line["closest"]
        return StepCertificate(
            line["step"],
            int(line["num_comparisons"]),
            closest and (shortened(str(closest["leaf"]), 200), float(closest["share"])),
            "" if line["certified"] is True else _difference(line["difference"] or {}),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def _difference(fields: Mapping[str, Any]) -> str:
    """Formats the fields of a difference, as in "cause device, leaf mdl_vars/w, ..."."""
    texts = [f"{name} {value}" for name, value in fields.items() if value not in ("", None)]
    return shortened(", ".join(texts), 500) or "not certified"
