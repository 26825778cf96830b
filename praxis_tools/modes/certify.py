"""`praxis certify`: writes or verifies certificates with digests of job files and data."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError, printable
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.host.places import local_file
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write

if TYPE_CHECKING:
    from praxis_tools.report.certified.facts import Reading

_SECONDS_BETWEEN_LINES = 10.0


class Certify(Mode):
    """Writes certificates with digests of job files and data, or verifies a certificate."""

    name = "certify"
    summary = "certifies jobs by digests of their files, or verifies a certificate"
    argument = None

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the jobs, --json, --html, --verify and --recorded_only."""
        options.add_argument(
            "jobs",
            metavar="JOB",
            nargs="*",
            help="job directories, in addition to --job_log_dir",
        )
        options.add_argument(
            "--json",
            metavar="FILE",
            type=file_to_write("certificate.json"),
            help="write the certificate to this file, for --verify",
        )
        options.add_argument(
            "--html",
            metavar="FILE",
            type=file_to_write("certificate.html"),
            help="write the certificate as an HTML page",
        )
        options.add_argument(
            "--verify",
            metavar="FILE",
            help="verify this certificate against the jobs; default: the jobs at the paths in the "
            "certificate",
        )
        options.add_argument(
            "--recorded_only",
            action="store_true",
            help="do not read the training data again; if the data has moved, pass its current "
            "location with --set instead",
        )

    def run(
        self,
        command: CommandLine,
        *,
        jobs: Sequence[str],
        json: AnyPath | None,
        html: AnyPath | None,
        verify: str | None,
        recorded_only: bool,
    ) -> int:
        """Certifies or verifies the jobs.

        Returns:
          1 if a job has a fault or differs from the certificate, otherwise 0.

        Raises:
          ConfigError: Options cannot be combined, or a directory contains no job.
        """
        if command.exp is not None:
            raise ConfigError(
                "--exp cannot be combined with `praxis certify`, which reads the experiment from "
                "the job. Remove --exp."
            )
        if verify is not None and (json or html):
            raise ConfigError(
                "--verify cannot be combined with --json or --html, because it writes no files. "
                "Remove them."
            )
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Computing digests requires no accelerator.
        from praxis_tools.report.certified.facts import Reading

        reading = Reading(command.packages, command.settings, recorded_only, _Progress())
        paths = [*jobs, *([command.job_log_dir] if command.job_log_dir is not None else [])]
        if verify is not None:
            return _verify(local_file(verify), paths, reading)
        return _certify(paths, reading, json, html)


def _certify(
    paths: Sequence[str],
    reading: "Reading",
    json_file: AnyPath | None,
    html: AnyPath | None,
) -> int:
    from praxis_lite.host.atomic_files import write_atomically
    from praxis_tools.report.certified.certificate import certify_jobs
    from praxis_tools.report.certified.certificate_page import page_of, text_of
    from praxis_tools.report.job_reader import JobReader, named_jobs

    named = named_jobs(paths)
    certificate = certify_jobs(named, reading)
    print(text_of(certificate))
    if json_file is not None:
        text = json.dumps(certificate.as_json(), indent=1) + "\n"
        write_atomically(json_file, text.encode())
        print(f"\nCertificate: {json_file.absolute()}")
    if html is not None:
        states = {name: JobReader(name, job).read(0) for name, job in named.items()}
        write_atomically(html, page_of(certificate, states).encode("utf-8", "replace"))
        print(f"\nOpen this page in a browser: {html.absolute()}")
    return int(bool(certificate.faults))


def _verify(file: Path, paths: Sequence[str], reading: "Reading") -> int:
    from praxis_lite.job.job_dir import open_for_reading
    from praxis_tools.report.certified.certificate import (
        DIFFERS,
        notes_on_versions,
        read_certificate,
        verify_certificate,
    )

    certificate, own = read_certificate(file)
    paths = paths or [job.path for job in certificate.jobs]
    if len(paths) != len(certificate.jobs):
        raise ConfigError(
            f"The number of jobs is {len(paths)}, but {file} certifies {len(certificate.jobs)}. "
            "List all jobs in the certificate's order, or none if they have not been moved."
        )
    jobs = [open_for_reading(path, writes=False) for path in paths]
    verdicts = [own, *verify_certificate(certificate, jobs, reading)]
    for verdict in verdicts:
        print(printable(str(verdict)))
    for note in notes_on_versions(certificate):
        print(printable(f"note: {note}"))
    for fault in certificate.faults:
        print(printable(f"WRONG according to the certificate: {fault}"))
    counts = {
        kind: sum(verdict.verdict == kind for verdict in verdicts)
        for kind in dict.fromkeys(verdict.verdict for verdict in verdicts)
    }
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return int(DIFFERS in counts or bool(certificate.faults))


class _Progress:
    """Prints progress messages to stderr, at most every ten seconds."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)
