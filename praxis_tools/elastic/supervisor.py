"""The supervisor of a host: runs a worker for each generation, and leads if it is the first."""

import contextlib
import dataclasses
import os
import secrets
import socket
import sys
import time

from praxis_lite.core.errors import ConfigError
from praxis_lite.job.health_files import HealthFiles
from praxis_lite.job.processes import signals
from praxis_tools.elastic.leader import Leader, Says, Settings
from praxis_tools.elastic.liveness import SILENT_SECONDS, Sight
from praxis_tools.elastic.members import (
    DIED,
    FAILED,
    LOST_PEER,
    Generation,
    Meeting,
    Member,
    WorkerEnd,
)
from praxis_tools.elastic.peer_store import PeerStore
from praxis_tools.elastic.stuck_workers import report_stuck
from praxis_tools.elastic.worker_order import LOST_PEER_STATUS, Order
from praxis_tools.elastic.worker_process import (
    WorkerProcess,
    end_of,
    remove_old_folders,
)

_BEAT_SECONDS = 0.5
# How often the files of others are looked at: of many hosts less often, for the file system's sake.
_POLL_SECONDS, _POLL_SECONDS_PER_HOST = 0.1, 0.001
# A supervisor that could not write its beat for so long ends its worker. A little later the others
# consider it gone.
_LEASE_SECONDS = SILENT_SECONDS - 4.0
# A worker that ended twice in a row before a step is given a rest, twice as long each time.
_REST_SECONDS = 30.0


class _Leaves(signals.SignalListener):
    """Hears a signal that asks this host to leave the job."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def _on_signal(self, signum: int) -> None:
        self.reason = signals.name(signum)
        signals.write_line(
            f"{self.reason}: this process leaves the job after the running step; a second signal "
            "ends it at once"
        )


class Supervisor:
    """A host's part in an elastic job, until the job ends or this host leaves.

    Args:
      health: files for the probes of a cluster; None: there are none.
    """

    def __init__(self, settings: Settings, health: HealthFiles | None = None):
        self._settings, self._health = settings, health
        self._meeting = Meeting(settings.job.elastic)
        self._own = Member(
            member=settings.member, incarnation=secrets.token_hex(8), host=socket.gethostname(),
            pid=os.getpid(), address=settings.address, port=_free_port(settings.address),
        )
        self._sight, self._say = Sight(settings.member), Says()
        self._leader = Leader(settings, self._meeting, self._sight, self._say)
        self._worker: WorkerProcess | None = None
        self._spare: WorkerProcess | None = None
        self._members: dict[int, Member] = {}
        self._generation: Generation | None = None
        self._stop_was_passed_on = False
        self._num_early_ends, self._no_spare_until = 0, 0.0
        self._beat_at = time.monotonic()
        self._poll_seconds = max(_POLL_SECONDS, _POLL_SECONDS_PER_HOST * settings.num_members)

    def run(self) -> int:
        """Returns the status of the job, or 0 once this host has left it.

        Raises:
          ConfigError: another living process has this one's number.
        """
        self._check_alone()
        remove_old_folders()
        key = self._meeting.key()
        with (
            _Leaves() as leaves, PeerStore(key, self._settings.address) as store,
            self._health or contextlib.nullcontext(),
        ):
            self.begin(store.address, key)
            try:
                while True:
                    status = self.turn()
                    if status is not None:
                        return status
                    if leaves.reason:
                        self.leave()
                    time.sleep(self._poll_seconds)
            finally:
                self.close()

    def begin(self, store: str, key: bytes) -> None:
        """Begins to take part, with the address of this host's peer store, and the job's key."""
        self._own, self._key = dataclasses.replace(self._own, store=store), key
        self._meeting.take_back_end(self._meeting.newest())
        self._beat(now=True)

    def leave(self) -> None:
        """Lets this host leave the job after a step."""
        self._own = dataclasses.replace(self._own, is_leaving=True)

    def turn(self) -> int | None:
        """Does the work that is due; returns the status with which this process ends, or None."""
        if time.monotonic() - self._beat_at > _LEASE_SECONDS and self._worker is not None:
            self._end_worker("its supervisor could not be seen by the others")
        self._prepare_worker()
        self._hear_worker()
        self._adopt_newest()
        self._beat()
        self._look()
        number = self._generation.number if self._generation else 0
        if ended := self._meeting.end_of(number):
            status, why = ended
            if status and self._settings.member == min(self._members, default=0):
                print(f"elastic: the job ends, status {status}: {why}", file=sys.stderr, flush=True)
            return status
        if self._meeting.stop_of(number) is not None and not self._stop_was_passed_on:
            self._stop_was_passed_on = True
            if self._worker is not None:
                self._worker.ask_to_stop()
        if self._own.is_leaving and self._has_left():
            return 0
        if self._leads():
            self._leader.lead(self._members, self._generation, self._taking_part())
        return None

    def close(self) -> None:
        """Ends the workers of this host, and its part in the job."""
        for worker in filter(None, (self._worker, self._spare)):
            worker.kill()
        written = self._meeting.read(self._settings.member)
        if written is not None and written.incarnation == self._own.incarnation:
            self._meeting.forget(self._settings.member)

    def _check_alone(self) -> None:
        before = self._meeting.read(self._settings.member)
        deadline = time.monotonic() + 4 * _BEAT_SECONDS
        while before is not None and time.monotonic() < deadline:
            time.sleep(self._poll_seconds)
            again = self._meeting.read(self._settings.member)
            if again is not None and again.beat != before.beat:
                raise ConfigError(
                    f"--process_id={self._settings.member} is taken: {again}, PID {again.pid}, "
                    "works on this job. Give each process another number."
                )

    def _prepare_worker(self) -> None:
        """Starts a spare worker, once the first worker needs this host's cores no longer."""
        is_needed = self._worker is None or self._own.first_step_time is not None
        is_needed &= time.monotonic() > self._no_spare_until
        if self._spare is None and is_needed and not self._own.is_leaving:
            self._spare = WorkerProcess(self._settings.argv)
        if self._spare is None or (status := self._spare.status()) is None:
            return
        if self._worker is None or self._own.end is not None:
            # Before any order: the command line is wrong, or what it names.
            end = end_of(status, self._spare.reports, was_asked=False)
            self._own = dataclasses.replace(self._own, end=end)
        else:
            # The worker continues; the error is reported when this host needs a new worker.
            self._no_spare_until = time.monotonic() + _REST_SECONDS
        self._spare = None

    def _hear_worker(self) -> None:
        if self._worker is None:
            return
        self._worker.hear()
        status = self._worker.status()
        own_alone = ("progress", "stacks", "stacks_file")
        reports = {k: v for k, v in self._worker.reports.items() if k not in own_alone}
        progress = self._worker.progress(self._generation.members.index(self._settings.member))
        is_new = self._own.worker.get("doing") != reports.get("doing")
        self._own = dataclasses.replace(
            self._own, worker=reports, phases=tuple(self._worker.phases),
            first_step_time=self._worker.first_step_time, progress=dataclasses.asdict(progress),
        )
        if status is None or self._own.end is not None:
            self._beat(now=is_new)
            return
        end = end_of(status, self._worker.reports, was_asked=self._stop_was_passed_on)
        if end.kind in (DIED, FAILED):
            early = self._worker.first_step_time is None
            self._num_early_ends = self._num_early_ends + 1 if early else 0
            if self._num_early_ends >= 2:
                rest = _REST_SECONDS * 2 ** (self._num_early_ends - 2)
                self._own = dataclasses.replace(self._own, rests_until=end.time + rest)
        self._own = dataclasses.replace(self._own, end=end)
        self._beat(now=True)

    def _end_worker(self, why: str) -> None:
        self._worker.kill()
        end = WorkerEnd(kind=LOST_PEER, status=LOST_PEER_STATUS, why=why, time=time.monotonic())
        self._own = dataclasses.replace(self._own, end=self._own.end or end)

    def _adopt_newest(self) -> None:
        """Takes part in the newest generation, if it is new and has this member."""
        last = self._generation.number if self._generation else 0
        newest = self._meeting.newest(last)
        if newest == last:
            return
        self._generation = generation = self._meeting.generation(newest)
        self._stop_was_passed_on = False
        own = self._settings.member
        if self._worker is not None:
            if generation.kind == "stuck" and own in generation.who and self._own.end is None:
                report_stuck(self._worker, generation.why, self._settings.job.stacks_txt)
            self._worker.kill()
            self._worker = None
        is_in = own in generation.members and (
            generation.incarnations[generation.members.index(own)] == self._own.incarnation
        )
        if not is_in:
            return
        members = {k: self._meeting.read(k) for k in generation.members}
        self._worker, self._spare = self._spare or WorkerProcess(self._settings.argv), None
        self._own = dataclasses.replace(
            self._own, generation=newest, end=None, worker={}, phases=(), first_step_time=None,
            port=_free_port(self._settings.address),
        )
        self._worker.give(Order(
            generation=newest, member=own, members=generation.members,
            stores=tuple(member.store if member else "" for member in members.values()),
            key=self._key, coordinator=generation.coordinator,
            num_slots=self._settings.num_members, folder=str(self._settings.job.elastic),
        ))
        self._beat(now=True)

    def _beat(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._beat_at < _BEAT_SECONDS:
            return
        self._own = dataclasses.replace(self._own, beat=self._own.beat + 1)
        if self._health is not None:
            self._health.alive()
            self._health.ready(self._own.first_step_time is not None and self._own.end is None)
        try:
            self._meeting.write(self._own)
            self._beat_at = time.monotonic()
        except OSError as error:
            self._say(f"{self._settings.job.path} cannot be written: {error.strerror or error}")

    def _look(self) -> None:
        """Looks at the files of all members, or at the leader's alone as long as it lives."""
        own, leader = self._settings.member, min(self._alive(), default=None)
        looks_at_all = (
            leader in (own, None) or self._generation is None or self._own.is_leaving
        )
        looked_at = range(self._settings.num_members) if looks_at_all else (leader, own)
        members = {k: self._meeting.read(k) for k in looked_at}
        known = {**self._members, **members}
        self._members = {k: member for k, member in known.items() if member is not None}
        there = self._members.get(own)
        if there is not None and there.incarnation != self._own.incarnation:
            raise ConfigError(
                f"{there}, PID {there.pid}, has taken the place of this process, which was silent "
                "for long."
            )
        self._members[own] = self._own
        self._sight.look({**members, own: self._own})
        if not looks_at_all and self._leads():
            self._look()  # So far it looked at the previous leader alone.

    def _taking_part(self) -> frozenset[int]:
        if self._generation is None:
            return frozenset()
        pairs = zip(self._generation.members, self._generation.incarnations, strict=True)
        return frozenset(
            k for k, incarnation in pairs
            if k in self._members and self._members[k].incarnation == incarnation
        )

    def _alive(self) -> set[int]:
        return self._sight.alive(self._taking_part())

    def _leads(self) -> bool:
        return min(self._alive()) == self._settings.member

    def _has_left(self) -> bool:
        """Returns True if this host, which leaves, has no work in the newest generation."""
        if self._worker is None or self._own.end is not None:
            others = self._alive() - {self._settings.member}
            # Until the others continue, they need its report that it stopped, and its peer store.
            newest = self._generation.number if self._generation else 0
            return not others or not newest or self._own.generation < newest or all(
                self._members[k].is_leaving for k in others
            )
        return False


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        return free.getsockname()[1]
