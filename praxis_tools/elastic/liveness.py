"""Tracks which members of an elastic job are alive, using heartbeats and connections."""

import dataclasses
import time
from collections.abc import Mapping

from praxis_lite.job.job_lock import LEASE_SECONDS
from praxis_lite.job.processes.addresses import refuses_connections
from praxis_tools.elastic.members import Member, WorkerEnd


@dataclasses.dataclass(frozen=True)
class Intervals:
    """How often supervisors read and write the files through which they coordinate, in seconds.

    Attributes:
      beat: Time between heartbeats.
      poll: Time between reads of the files of other members.
      probe: Time without a heartbeat after which a member's port is probed. If only the process was
        killed, the host refuses the connection immediately.
      silent: Time without a heartbeat after which a member is considered dead.
      lease: Time without a successful heartbeat after which a supervisor kills its worker, shortly
        before other members consider it dead.
    """

    beat: float
    poll: float
    probe: float
    silent: float

    @property
    def lease(self) -> float:
        return self.silent - 4.0


ON_DISK = Intervals(beat=0.5, poll=0.1, probe=1.0, silent=12.0)
# Google Cloud Storage allows one write per second to each object, and every request costs money.
# The workers of a silent host stop writing to the job after LEASE_SECONDS / 2.
IN_STORE = Intervals(beat=2.0, poll=1.0, probe=3.0, silent=LEASE_SECONDS)


@dataclasses.dataclass
class _MemberState:
    incarnation: str
    beat: int
    beat_time: float  # Time of the last new heartbeat, in seconds of time.monotonic.
    end: tuple[int, WorkerEnd | None]  # Generation and exit of the last worker.
    end_time: float  # Time at which this exit was first observed.
    has_new_beats: bool = False
    is_refused: bool = False  # Whether the last connection was refused.
    probe_time: float = 0.0


class Liveness:
    """Tracks which members are alive.

    All times are by this host's clock, because the clocks of different hosts are not synchronized.

    Args:
      own: Number of the member on this host.
      intervals: The intervals of all members.
    """

    def __init__(self, own: int, intervals: Intervals):
        self._own, self._intervals = own, intervals
        self._members: dict[int, _MemberState] = {}

    def update(self, members: Mapping[int, Member | None]) -> None:
        """Updates the state of some members from their current files.

        Args:
          members: Maps numbers to members, or to None if a member has no file. Other members are
            unchanged.
        """
        now = time.monotonic()
        for k, member in members.items():
            state = self._members.get(k)
            if member is None:
                self._members.pop(k, None)
            elif state is None or state.incarnation != member.incarnation:
                end = member.generation, member.end
                self._members[k] = _MemberState(member.incarnation, member.beat, now, end, now)
            elif member.beat != state.beat:
                if state.end != (end := (member.generation, member.end)):
                    state.end, state.end_time = end, now
                state.beat, state.beat_time = member.beat, now
                state.has_new_beats, state.is_refused = True, False
            elif member.store and now > self._intervals.probe + max(
                state.beat_time, state.probe_time
            ):
                state.probe_time = now
                state.is_refused = k != self._own and refuses_connections(member.store)

    def probe(self, members: Mapping[int, Member]) -> None:
        """Checks whether members' processes are still running, by connecting to them."""
        for k, member in members.items():
            if k in self._members and k != self._own and member.store:
                self._members[k].is_refused = refuses_connections(member.store)

    def alive(self, participants: frozenset[int] = frozenset()) -> set[int]:
        """Returns the numbers of the members that are alive.

        Args:
          participants: Members that are considered alive until they have been silent for too long.
            Other members are only considered alive after a new heartbeat, because files from
            earlier launches are not removed.
        """
        now = time.monotonic()
        return {
            k
            for k, state in self._members.items()
            if k == self._own
            or (
                (state.has_new_beats or k in participants)
                and not state.is_refused
                and now - state.beat_time < self._intervals.silent
            )
        }

    def times(self) -> dict[int, float]:
        """Returns the time of each member's last heartbeat, in seconds of time.monotonic."""
        return {k: state.beat_time for k, state in self._members.items()}

    def end_times(self) -> dict[int, float]:
        """Returns when each worker's exit was first observed, in seconds of time.monotonic."""
        return {k: state.end_time for k, state in self._members.items() if state.end[1] is not None}
