"""The journal and the claims of a sweep in an object store, which has no locks and no appending."""

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from praxis_lite.host.file_reading import lines_of
from praxis_lite.host.object_stores import StorePath
from praxis_lite.job.job_lock import Lease

_RETRY_SECONDS = 0.2


class StoredJournal:
    """A journal in an object, with the methods of Optuna's `BaseJournalBackend`.

    No process overwrites the entries of another one.
    """

    def __init__(self, journal: StorePath):
        self._journal = journal

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Returns the entries from a number."""
        return [json.loads(line) for line in lines_of(self._journal)[log_number_from:]]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends entries, all or none."""
        # Optuna ignores this entry. It makes the lines unique, as `append_bytes` requires.
        token = secrets.token_hex(8)
        lines = "".join(json.dumps({**log, "written_by": token}) + "\n" for log in logs)
        self._journal.append_bytes(lines.encode())


class StoredClaims(contextlib.AbstractContextManager):
    """The trials that this process has claimed, with the methods of `Claims`.

    Each claim is a lease. The trial of a worker that was killed is free again at once for processes
    on the same host, and after at most twice `LEASE_SECONDS` for those on other hosts.

    Args:
      directory: Directory of the sweep.
    """

    def __init__(self, directory: StorePath):
        self._folder = directory / "claims"
        self._leases: dict[int, Lease] = {}

    def __exit__(self, *exc_info: object) -> None:
        for number in list(self._leases):
            self.release(number)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context manager in which no other process chooses a trial."""
        while not (lease := Lease(self._folder)).take_if_free():
            time.sleep(_RETRY_SECONDS)
        with contextlib.closing(lease):
            yield

    def claim(self, number: int) -> bool:
        """Claims a trial; returns False if this or another process has already claimed it."""
        lease = Lease(self._folder / str(number))
        if number in self._leases or not lease.take_if_free():
            return False
        self._leases[number] = lease
        return True

    def release(self, number: int) -> None:
        """Releases the claim on a trial."""
        self._leases.pop(number).close()
