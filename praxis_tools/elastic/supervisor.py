"""The supervisor of a host in an elastic job.

The supervisor runs one worker per generation. The supervisor of the live member with the lowest
number also leads the job.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import StorePath, StoreUnreachable
from praxis_lite.job.health_files import HealthFiles
from praxis_lite.job.processes import signals
from praxis_lite.job.processes.logs import write_now
from praxis_tools.elastic.leader import Leader, Settings, StatusPrinter
from praxis_tools.elastic.liveness import IN_STORE, ON_DISK, Liveness
from praxis_tools.elastic.members import (
    DIED,
    FAILED,
    LOST_PEER,
    Generation,
    Member,
    Rendezvous,
    WorkerEnd,
)
from praxis_tools.elastic.peer_store import PeerStore
from praxis_tools.elastic.stuck_workers import report_stuck
from praxis_tools.elastic.worker_assignment import LOST_PEER_STATUS, Assignment
from praxis_tools.elastic.worker_process import (
    WorkerProcess,
    classify_end,
    remove_old_folders,
)

# The first heartbeats are sent more often, because only members with new ones are considered alive.
_NUM_QUICK_BEATS, _QUICK_BEAT_SECONDS = 5, 1.0
# The interval between reads grows with the number of hosts, to limit the load on the file system.
_POLL_SECONDS_PER_HOST = 0.001
# Backoff after a worker has exited before its first step twice in a row. The backoff doubles each
# time this happens again.
_REST_SECONDS = 30.0


class _LeaveListener(signals.SignalListener):
    """Records the name of the signal that asks this host to leave the job."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def _on_signal(self, signum: int) -> None:
        self.reason = signals.name(signum)
        write_now(
            f"{self.reason}: this process will leave the job after the current step. Send the "
            "signal again to end it immediately."
        )


class Supervisor:
    """Runs one host of an elastic job until the job ends or the host leaves.

    Args:
      settings: Settings of the job.
      health: Files that a cluster manager probes, or None if there are no probes.
    """

    def __init__(self, settings: Settings, health: HealthFiles | None = None):
        self._settings, self._health = settings, health
        self._rendezvous = Rendezvous(settings.job.elastic)
        self._intervals = IN_STORE if isinstance(settings.job.elastic, StorePath) else ON_DISK
        self._own = Member(
            member=settings.member,
            incarnation=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            address=settings.address,
            port=_free_port(settings.address),
        )
        self._liveness = Liveness(settings.member, self._intervals)
        self._print_status = StatusPrinter()
        self._leader = Leader(settings, self._rendezvous, self._liveness, self._print_status)
        self._worker: WorkerProcess | None = None
        self._spare: WorkerProcess | None = None
        self._members: dict[int, Member] = {}
        self._generation: Generation | None = None
        self._has_forwarded_stop = False
        self._num_early_ends, self._no_spare_until = 0, 0.0  # Exits before the first step.
        self._last_beat_time = time.monotonic()
        self._poll_seconds = max(
            self._intervals.poll, _POLL_SECONDS_PER_HOST * settings.num_members
        )

    def run(self) -> int:
        """Runs until the job ends or this host leaves; returns the exit status.

        Raises:
          ConfigError: Another running process uses the same `--process_id`.
        """
        self._check_number_is_free()
        remove_old_folders()
        key = self._rendezvous.key()
        leave_listener = _LeaveListener()
        with (
            leave_listener,
            PeerStore(key, self._settings.address) as store,
            self._health or contextlib.nullcontext(),
        ):
            self.join(store.address, key)
            try:
                while True:
                    try:
                        status = self.poll()
                        if status is not None:
                            return status
                    except StoreUnreachable as error:  # Retry.
                        self._print_status(str(error))
                    if leave_listener.reason:
                        self.leave()
                    time.sleep(self._poll_seconds)
            finally:
                self.close()

    def join(self, store: str, key: bytes) -> None:
        """Joins the job.

        Args:
          store: "host:port" of this host's peer store.
          key: Secret key of the job.
        """
        self._own, self._key = dataclasses.replace(self._own, store=store), key
        self._rendezvous.clear_job_end(self._rendezvous.newest_generation())
        self._beat(now=True)

    def leave(self) -> None:
        """Announces that this host will leave the job after the current step."""
        self._own = dataclasses.replace(self._own, is_leaving=True)

    def poll(self) -> int | None:
        """Runs one iteration of the supervisor; returns the exit status, or None to continue.

        The order matters: the worker's state is read before the heartbeat that publishes it, and
        the members' files are read before the leader decides.
        """
        # The other members are about to start a generation without this host.
        silent_seconds = time.monotonic() - self._last_beat_time
        if silent_seconds > self._intervals.lease and self._worker is not None:
            self._end_worker(
                self._worker, "was stopped because its supervisor could not write heartbeats"
            )
        self._prepare_worker()
        self._update_from_worker()
        self._adopt_newest_generation()
        self._beat()
        self._read_members()
        number = self._generation.number if self._generation else 0
        if job_end := self._rendezvous.job_end(number):
            status, why = job_end
            if status and self._settings.member == min(self._members, default=0):
                _log.error("elastic: the job ended with status %d: %s", status, why)
            return status
        if self._rendezvous.stop_reason(number) is not None and not self._has_forwarded_stop:
            self._has_forwarded_stop = True
            if self._worker is not None:
                self._worker.ask_to_stop()
        if self._own.is_leaving and self._has_left():
            return 0
        if self._is_leader():
            self._leader.lead(self._members, self._generation, self._participants())
        return None

    def close(self) -> None:
        """Kills the workers of this host and removes its member file."""
        for worker in filter(None, (self._worker, self._spare)):
            worker.kill()
        with contextlib.suppress(StoreUnreachable):
            written = self._rendezvous.read(self._settings.member)
            if written is not None and written.incarnation == self._own.incarnation:
                self._rendezvous.remove(self._settings.member)

    def _check_number_is_free(self) -> None:
        before = self._rendezvous.read(self._settings.member)
        deadline = time.monotonic() + 4 * self._intervals.beat
        # If the file is from an earlier launch, its heartbeats do not continue.
        while before is not None and time.monotonic() < deadline:
            time.sleep(self._poll_seconds)
            after = self._rendezvous.read(self._settings.member)
            if after is not None and after.beat != before.beat:
                raise ConfigError(
                    f"--process_id={self._settings.member} is already used by {after}, PID "
                    f"{after.pid}. Set a different --process_id for each process in the job."
                )

    def _prepare_worker(self) -> None:
        """Starts a spare worker once the current worker has finished starting up.

        Starting it earlier would slow down the current worker.
        """
        is_needed = self._worker is None or self._own.first_step_time is not None
        is_needed &= time.monotonic() > self._no_spare_until
        if self._spare is None and is_needed and not self._own.is_leaving:
            self._spare = WorkerProcess(self._settings.argv)
        if self._spare is None or (status := self._spare.status()) is None:
            return
        if self._worker is None or self._own.end is not None:
            # The worker exited before it received an assignment, so the command line or the
            # experiment is invalid.
            end = classify_end(status, self._spare.reports, was_asked=False)
            self._own = dataclasses.replace(self._own, end=end)
        else:
            # Training continues with the current worker. When this host needs the next spare
            # worker, that worker reports the error again.
            self._no_spare_until = time.monotonic() + _REST_SECONDS
        self._spare = None

    def _update_from_worker(self) -> None:
        """Copies the worker's reports and status to this member's state."""
        if self._worker is None or self._generation is None:
            return
        self._worker.read_reports()
        status = self._worker.status()
        # These reports are only for this host. The heartbeat publishes all others.
        local_only = ("progress", "stacks", "stacks_file")
        reports = {k: v for k, v in self._worker.reports.items() if k not in local_only}
        progress = self._worker.progress(self._generation.members.index(self._settings.member))
        is_new_phase = self._own.worker.get("doing") != reports.get("doing")
        self._own = dataclasses.replace(
            self._own,
            worker=reports,
            phases=tuple(self._worker.phases),
            first_step_time=self._worker.first_step_time,
            progress=dataclasses.asdict(progress),
        )
        if status is None or self._own.end is not None:
            self._beat(now=is_new_phase)
            return
        end = classify_end(status, self._worker.reports, was_asked=self._has_forwarded_stop)
        if end.kind in (DIED, FAILED):
            is_early = self._worker.first_step_time is None
            self._num_early_ends = self._num_early_ends + 1 if is_early else 0
            if self._num_early_ends >= 2:
                rest = _REST_SECONDS * 2 ** (self._num_early_ends - 2)
                self._own = dataclasses.replace(self._own, rests_until=end.time + rest)
        self._own = dataclasses.replace(self._own, end=end)
        self._beat(now=True)

    def _end_worker(self, worker: WorkerProcess, why: str) -> None:
        worker.kill()
        end = WorkerEnd(kind=LOST_PEER, status=LOST_PEER_STATUS, why=why, time=time.monotonic())
        self._own = dataclasses.replace(self._own, end=self._own.end or end)

    def _adopt_newest_generation(self) -> None:
        """Joins the newest generation with a new worker, unless this host has already joined."""
        last = self._generation.number if self._generation else 0
        newest = self._rendezvous.newest_generation(last)
        if newest == last:
            return
        # If a store cannot be reached, the next poll starts again from here.
        generation = self._rendezvous.generation(newest)
        members = {k: self._rendezvous.read(k) for k in generation.members}
        self._generation, self._has_forwarded_stop = generation, False
        own = self._settings.member
        if self._worker is not None:
            if generation.kind == "stuck" and own in generation.who and self._own.end is None:
                report_stuck(self._worker, generation.why, self._settings.job.stacks_txt)
            self._worker.kill()
            self._worker = None
        # A member that has restarted since the generation was created has a new incarnation.
        is_participant = own in generation.members and (
            generation.incarnations[generation.members.index(own)] == self._own.incarnation
        )
        if not is_participant:
            return
        # Use the spare worker, which was started in advance.
        self._worker, self._spare = self._spare or WorkerProcess(self._settings.argv), None
        self._own = dataclasses.replace(
            self._own,
            generation=newest,
            end=None,
            worker={},
            phases=(),
            first_step_time=None,
            port=_free_port(self._settings.address),
        )
        self._worker.assign(
            Assignment(
                generation=newest,
                member=own,
                members=generation.members,
                stores=tuple(member.store if member else "" for member in members.values()),
                key=self._key,
                coordinator=generation.coordinator,
                num_slots=self._settings.num_members,
                folder=str(self._settings.job.elastic),
                supervisor=self._own.store,
            )
        )
        self._beat(now=True)

    def _beat(self, *, now: bool = False) -> None:
        """Writes this member's file with a new heartbeat, if one is due or `now` is True."""
        interval = self._intervals.beat
        if self._own.beat < _NUM_QUICK_BEATS:
            interval = min(interval, _QUICK_BEAT_SECONDS)
        if not now and time.monotonic() - self._last_beat_time < interval:
            return
        self._own = dataclasses.replace(self._own, beat=self._own.beat + 1)
        if self._health is not None:
            self._health.alive()
            self._health.ready(self._own.first_step_time is not None and self._own.end is None)
        try:
            self._rendezvous.write(self._own)
            self._last_beat_time = time.monotonic()
        except OSError as error:
            self._print_status(
                f"{self._settings.job.path} cannot be written: {error.strerror or error}"
            )
        except StoreUnreachable as error:
            self._print_status(str(error))

    def _read_members(self) -> None:
        """Reads the leader's file while the leader is alive, otherwise the files of all members."""
        own, leader = self._settings.member, min(self._alive(), default=None)
        numbers: Sequence[int] = range(self._settings.num_members)
        reads_all = True
        if leader not in (own, None) and self._generation is not None and not self._own.is_leaving:
            numbers, reads_all = (leader, own), False
        members = {k: self._rendezvous.read(k) for k in numbers}
        known = {**self._members, **members}
        self._members = {k: member for k, member in known.items() if member is not None}
        written = self._members.get(own)
        if written is not None and written.incarnation != self._own.incarnation:
            raise ConfigError(
                f"{written}, PID {written.pid}, has replaced this process, because this process "
                "had sent no heartbeat for too long."
            )
        self._members[own] = self._own
        self._liveness.update({**members, own: self._own})
        if not reads_all and self._is_leader():
            self._read_members()  # The previous leader has died, so read all files.

    def _participants(self) -> frozenset[int]:
        """Returns the generation's members whose supervisors have not restarted since its start."""
        if self._generation is None:
            return frozenset()
        pairs = zip(self._generation.members, self._generation.incarnations, strict=True)
        return frozenset(
            k
            for k, incarnation in pairs
            if k in self._members and self._members[k].incarnation == incarnation
        )

    def _alive(self) -> set[int]:
        return self._liveness.alive(self._participants())

    def _is_leader(self) -> bool:
        return min(self._alive()) == self._settings.member

    def _has_left(self) -> bool:
        """Returns whether this host's worker has exited and no other host needs this supervisor."""
        if self._worker is None or self._own.end is not None:
            others = self._alive() - {self._settings.member}
            # Until the next generation begins, other hosts need this member's file and peer store.
            newest = self._generation.number if self._generation else 0
            return (
                not others
                or not newest
                or self._own.generation < newest
                or all(self._members[k].is_leaving for k in others)
            )
        return False


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        return free.getsockname()[1]


_log = logging.getLogger(__name__)
