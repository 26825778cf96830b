"""The files through which supervisors coordinate: members, generations and the end of the job.

The files are in the job directory, on a file system that all hosts share or in an object store.
Each member writes only its own file. The first member that proposes a generation creates its file
atomically. Therefore, no supervisor waits for another one, and any supervisor may die at any time.
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.atomic_files import create_atomically
from praxis_lite.host.file_reading import content_of, parse_json
from praxis_lite.host.object_stores import AnyPath, StorePath

TRAINED, STOPPED, LOST_PEER, DIED, FAILED, REFUSED = (
    "trained",
    "stopped",
    "lost peer",
    "died",
    "failed",
    "refused",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How and why a worker exited.

    Attributes:
      kind: TRAINED (the job is complete), STOPPED (on request), LOST_PEER (another process died),
        DIED (killed by a signal), FAILED (an exception), or REFUSED (an error that the user has to
        fix, so a retry would not help).
      status: Exit status of the process, negative for a signal.
      why: Description of the reason for the exit.
      time: Time at which the worker exited, in seconds of its host's time.monotonic.
    """

    kind: str
    status: int
    why: str
    time: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """The state of a supervisor and its worker, written by the supervisor as its heartbeat.

    All times are in seconds of the host's time.monotonic. Other hosts may only use their
    differences.

    Attributes:
      member: Number of the member, from `--process_id`.
      incarnation: Random string that is different each time a supervisor starts.
      beat: Heartbeat, a counter that increases while the supervisor is alive.
      host: Name of the host, for messages.
      pid: Process id of the supervisor, for messages.
      address: Address at which other hosts reach this host.
      port: A free port for the coordination service of the next generation.
      store: "host:port" of the member's peer store.
      is_leaving: Whether the member was asked to leave and will not join further generations.
      rests_until: Time until which the member does not join any generation, because its worker has
        repeatedly exited before the first step.
      generation: Generation of the current or last worker, or 0 if there was no worker yet.
      end: How the worker exited, or None if the worker is still running or was not started.
      worker: Values reported by the worker, keyed by name, except for the progress.
      progress: Fields of the worker's `Progress`, as observed on its host.
      phases: The worker's phases up to its first step, as (name, time at which it began) pairs.
      first_step_time: Time of the worker's first step in the generation, or None before it.
    """

    member: int
    incarnation: str
    beat: int = 0
    host: str = ""
    pid: int = 0
    address: str = ""
    port: int = 0
    store: str = ""
    is_leaving: bool = False
    rests_until: float = 0.0
    generation: int = 0
    end: WorkerEnd | None = None
    worker: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    progress: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    phases: tuple[tuple[str, float], ...] = ()
    first_step_time: float | None = None

    def __str__(self) -> str:
        return f"process {self.member} ({self.host})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A set of members that train together until a member dies, leaves or joins.

    Attributes:
      number: Number of the generation, from 1. The largest number is the current generation.
      kind: Event that ended the previous generation: "start", "died", "stuck", "left", "came" or
        "failed".
      who: Numbers of the members that caused the event.
      why: Description of the event.
      members: Numbers of the members, in the order of their JAX processes.
      incarnations: Incarnations of the members, in the same order.
      coordinator: "host:port" of JAX's coordination service.
      event: Time of the event, in Unix seconds by the leader's clock.
      noticed: Time at which the leader decided to start this generation, by the same clock.
      agreed: Time at which this generation was created, by the same clock.
      last_step: Last step that is known to have completed before this generation.
      num_fruitless: Number of generations directly before this one that completed no step.
    """

    number: int
    kind: str
    who: tuple[int, ...]
    why: str
    members: tuple[int, ...]
    incarnations: tuple[str, ...]
    coordinator: str
    event: float
    noticed: float
    agreed: float
    last_step: int
    num_fruitless: int = 0


class Rendezvous:
    """Reads and writes the files through which supervisors coordinate.

    In an object store, all methods raise ConfigError if the store cannot be used.

    Args:
      folder: Folder `elastic` in the job directory, which is created if it does not exist.
    """

    def __init__(self, folder: AnyPath):
        self._members, self._generations = folder / "members", folder / "generations"
        self._folder = folder
        try:
            for path in (self._members, self._generations):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Cannot create {folder}: {error.strerror}. Set --job_log_dir to a directory that "
                "this host can write to."
            ) from None

    def key(self) -> bytes:
        """Returns the secret key that the job's processes use to authenticate to peer stores.

        The first call creates the key.
        """
        path = self._folder / "key"
        create_atomically(path, secrets.token_bytes(32), 0o600)
        return content_of(path)

    def write(self, member: Member) -> None:
        """Writes a member's file atomically; raises OSError if the file cannot be written."""
        path = self._members / f"{member.member}.json"
        content = json.dumps(dataclasses.asdict(member)).encode()
        if isinstance(path, StorePath):
            path.write_bytes(content)
            return
        # Unlike `write_atomically`, do not sync the file, because it is written often.
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(content)
        os.replace(temporary, path)

    def read(self, member: int) -> Member | None:
        """Reads a member's file; returns None if the file does not exist or is damaged."""
        try:
            fields = parse_json(content_of(self._members / f"{member}.json").decode())
            end = fields.pop("end")
            return Member(
                **{**fields, "phases": tuple(map(tuple, fields["phases"]))},
                end=end and WorkerEnd(**end),
            )
        except ConfigError:  # The store could not be read, so the member may exist.
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def remove(self, member: int) -> None:
        """Removes a member's file."""
        (self._members / f"{member}.json").unlink(missing_ok=True)

    def newest_generation(self, known: int = 0) -> int:
        """Returns the number of the newest generation, or 0 if there is none.

        Args:
          known: Number of a generation that is known to exist, or 0. If it is positive, only larger
            numbers are looked up, which is faster than listing the folder.
        """
        if not known:
            names = (path.name.partition(".") for path in self._generations.iterdir())
            known = max(
                (int(name) for name, _, kind in names if kind == "json" and name.isdecimal()),
                default=0,
            )
        # The listing of a store may be outdated.
        while (self._generations / f"{known + 1}.json").is_file():
            known += 1
        return known

    def generation(self, number: int) -> Generation:
        """Reads a generation's file; raises ConfigError if the file is damaged."""
        path = self._generations / f"{number}.json"
        try:
            fields = parse_json(content_of(path).decode())
            lists = {name: tuple(fields[name]) for name in ("who", "members", "incarnations")}
            return Generation(**{**fields, **lists})
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} is damaged or cannot be read ({error}). End all processes of the job, "
                "delete the file, and restart the processes. Checkpoints are not affected."
            ) from None

    def create_generation(self, generation: Generation) -> bool:
        """Creates a generation's file; returns False if another member has already created it."""
        return self._create(f"{generation.number}.json", dataclasses.asdict(generation))

    def request_stop(self, number: int, why: str) -> bool:
        """Asks the workers of a generation to stop after the current step.

        Returns False if they have already been asked.
        """
        return self._create(f"{number}.stop", {"why": why})

    def stop_reason(self, number: int) -> str | None:
        """Returns why a generation was asked to stop, or None if it was not asked."""
        return self._read(f"{number}.stop", "why")

    def end_job(self, number: int, status: int, why: str) -> None:
        """Records that the job ends in a generation; all supervisors then exit with this status."""
        self._create(f"{number}.end", {"status": status, "why": why})

    def job_end(self, number: int) -> tuple[int, str] | None:
        """Returns (status, reason) if the job ended in a generation, otherwise None."""
        status = self._read(f"{number}.end", "status")
        return None if status is None else (status, self._read(f"{number}.end", "why"))

    def clear_job_end(self, number: int) -> None:
        """Removes the record that the job has ended, because the job is being restarted."""
        (self._generations / f"{number}.end").unlink(missing_ok=True)

    def _create(self, name: str, fields: Mapping[str, Any]) -> bool:
        return create_atomically(self._generations / name, json.dumps(fields).encode())

    def _read(self, name: str, field: str) -> Any:
        try:
            return parse_json(content_of(self._generations / name).decode())[field]
        except FileNotFoundError:
            return None
