"""The files by which supervisors see each other: members, generations, the end of the job.

They are stored in the job's directory, which all hosts share. A member writes only its own file; a
generation's file is made once, by the member that comes first. So no supervisor waits for another,
and any of them may be gone at any time.
"""

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import content_of, parse_json

TRAINED, STOPPED, LOST_PEER, DIED, FAILED, REFUSED = (
    "trained", "stopped", "lost peer", "died", "failed", "refused",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How the worker of a member ended in a generation.

    Attributes:
      kind: TRAINED: the job is done; STOPPED: as it was asked to; LOST_PEER: another process was
        gone; DIED: by a signal; FAILED: by an exception; REFUSED: by an error that the user can
        fix, so that a retry does not help.
      status: of the process, negative for a signal.
      why: as text.
      time: in seconds of its host's time.monotonic.
    """

    kind: str
    status: int
    why: str
    time: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A supervisor and its worker, as written by the supervisor about twice a second.

    Its times are in seconds of its host's time.monotonic: only differences of them mean something
    to other hosts.

    Attributes:
      member: its number, `--process_id`.
      incarnation: random, another one each time that a supervisor starts.
      beat: a number that grows as long as the supervisor lives.
      host, pid: for messages.
      address: where other hosts reach this host.
      port: free there, for the coordination service of the next generation.
      store: "host:port" of its peer store.
      is_leaving: it was asked to end, and takes part in no further generation.
      rests_until: until then it takes part in none, for its worker ended twice before a step.
      generation: in which its worker works, or worked last; 0: none.
      end: how that worker ended; None: it lives, or there is none.
      worker: what it reported, by name, but for its progress.
      progress: the fields of its `Progress`, as its host sees it.
      phases: of it up to its first step, each with the time when it began.
      first_step_time: when its first step of the generation was made, or None.
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
    """The processes that train together until a process is gone, leaves, or comes.

    Attributes:
      number: from 1; the largest counts.
      kind: "start", "died", "stuck", "left", "came" or "failed": what ended the one before.
      who: the numbers of the members that it happened to.
      why: as text.
      members: in the order of their processes.
      incarnations: of the members, in that order.
      coordinator: "host:port" of JAX's coordination service.
      event, noticed, agreed: in Unix seconds, by the clock of the leader alone: when it happened
        as far as the leader saw, when it decided, and when this was written.
      last_step: the last step that was made before, as far as is known.
      num_fruitless: how many generations in a row, up to the one before, made no step.
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


class Meeting:
    """The folder in which supervisors meet.

    Args:
      folder: `elastic` in the job's directory; made if it is absent.
    """

    def __init__(self, folder: Path):
        self._members, self._generations = folder / "members", folder / "generations"
        self._folder = folder
        try:
            for path in (self._members, self._generations):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be made ({error.strerror}). Name a --job_log_dir that this host "
                "can write."
            ) from None

    def key(self) -> bytes:
        """Returns the job's secret, by which its peer stores know its processes."""
        path = self._folder / "key"
        temporary = self._folder / f".key.{secrets.token_hex(8)}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
        return content_of(path)

    def write(self, member: Member) -> None:
        """Writes a member's file; raises OSError."""
        path = self._members / f"{member.member}.json"
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(dataclasses.asdict(member)))
        os.replace(temporary, path)

    def read(self, member: int) -> Member | None:
        """Returns a member from its file, or None if there is none that can be read."""
        try:
            fields = parse_json(content_of(self._members / f"{member}.json").decode())
            end = fields.pop("end")
            return Member(
                **{**fields, "phases": tuple(map(tuple, fields["phases"]))},
                end=end and WorkerEnd(**end),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def forget(self, member: int) -> None:
        """Removes the file of a member that ends."""
        (self._members / f"{member}.json").unlink(missing_ok=True)

    def newest(self, known: int = 0) -> int:
        """Returns the number of the newest generation; 0 if there is none.

        Args:
          known: a generation that exists; only later ones are looked for. 0: all are.
        """
        if not known:
            names = (name.partition(".") for name in os.listdir(self._generations))
            return max((int(name) for name, _, kind in names
                        if kind == "json" and name.isdecimal()), default=0)
        while (self._generations / f"{known + 1}.json").exists():
            known += 1
        return known

    def generation(self, number: int) -> Generation:
        """Returns a generation; raises ConfigError if its file is damaged."""
        path = self._generations / f"{number}.json"
        try:
            fields = parse_json(content_of(path).decode())
            lists = {
                name: tuple(fields[name]) for name in ("who", "members", "incarnations")
            }
            return Generation(**{**fields, **lists})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} cannot be read, or is damaged ({error}). End all processes of the job, "
                "remove it, and start them again: checkpoints are not touched."
            ) from None

    def begin(self, generation: Generation) -> bool:
        """Makes the file of a generation; returns False if another member was faster."""
        return self._make(f"{generation.number}.json", dataclasses.asdict(generation))

    def ask_to_stop(self, number: int, why: str) -> bool:
        """Asks the workers of a generation to stop after a step; False if that was done before."""
        return self._make(f"{number}.stop", {"why": why})

    def stop_of(self, number: int) -> str | None:
        """Returns why a generation was asked to stop, or None."""
        return self._read(f"{number}.stop", "why")

    def end(self, number: int, status: int, why: str) -> None:
        """Ends the job in a generation: all supervisors end with this status."""
        self._make(f"{number}.end", {"status": status, "why": why})

    def end_of(self, number: int) -> tuple[int, str] | None:
        """Returns the status and the reason with which the job ended in a generation, or None."""
        status = self._read(f"{number}.end", "status")
        return None if status is None else (status, self._read(f"{number}.end", "why"))

    def take_back_end(self, number: int) -> None:
        """Removes the end of a job that is started again."""
        (self._generations / f"{number}.end").unlink(missing_ok=True)

    def _make(self, name: str, fields: Mapping[str, Any]) -> bool:
        """Makes a complete file, unless that name is taken; returns True if it did."""
        temporary = self._generations / f".{name}.{secrets.token_hex(8)}"
        temporary.write_text(json.dumps(fields))
        try:
            os.link(temporary, self._generations / name)
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink()

    def _read(self, name: str, field: str) -> Any:
        try:
            return parse_json(content_of(self._generations / name).decode())[field]
        except FileNotFoundError:
            return None
