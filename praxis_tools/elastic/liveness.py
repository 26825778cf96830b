"""Tracks which members of an elastic job are alive, using heartbeats and connections."""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping

from praxis_lite.job.processes import addresses
from praxis_tools.elastic.members import Member, WorkerEnd

# A member without a new heartbeat for this long is considered dead.
SILENT_SECONDS = 12.0
# A member's port is probed after this long without a heartbeat. If only the process was killed, the
# host refuses the connection immediately.
_PROBE_SECONDS = 1.0


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
    """

    def __init__(self, own: int):
        self._own = own
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
            elif now - max(state.beat_time, state.probe_time) > _PROBE_SECONDS and member.store:
                state.probe_time = now
                state.is_refused = k != self._own and _refuses(member.store)

    def probe(self, members: Mapping[int, Member]) -> None:
        """Checks whether members' processes are still running, by connecting to them."""
        for k, member in members.items():
            if k in self._members and k != self._own and member.store:
                self._members[k].is_refused = _refuses(member.store)

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
                and now - state.beat_time < SILENT_SECONDS
            )
        }

    def times(self) -> dict[int, float]:
        """Returns the time of each member's last heartbeat, in seconds of time.monotonic."""
        return {k: state.beat_time for k, state in self._members.items()}

    def end_times(self) -> dict[int, float]:
        """Returns when each worker's exit was first observed, in seconds of time.monotonic."""
        return {k: state.end_time for k, state in self._members.items() if state.end[1] is not None}


def _refuses(address: str) -> bool:
    """Returns whether a host refuses connections to "host:port" because no process is listening."""
    with contextlib.suppress(OSError):
        try:
            socket.create_connection(addresses.parse_address(address), timeout=0.3).close()
        except ConnectionRefusedError:
            return True
    return False
