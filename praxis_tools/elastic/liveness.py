"""Which members are alive, as a supervisor sees it: by their beats, and by connecting to them."""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping

from praxis_lite.job.processes import addresses
from praxis_tools.elastic.members import Member, WorkerEnd

# A member whose file stays as it is for so long is gone.
SILENT_SECONDS = 12.0
# After so long it is asked whether its host knows its port: a process that was killed is known
# to be gone at once.
_DOUBT_SECONDS = 1.0


@dataclasses.dataclass
class _Seen:
    incarnation: str
    beat: int
    at: float  # When the beat grew, in seconds of time.monotonic.
    end: tuple[int, WorkerEnd | None]  # With the generation.
    end_at: float  # When that end was first seen.
    has_grown: bool = False
    is_refused: bool = False
    asked_at: float = 0.0


class Sight:
    """Tells which members live. Only this host's clock counts, for clocks of hosts differ.

    Args:
      own: the number of the member that looks.
    """

    def __init__(self, own: int):
        self._own = own
        self._members: dict[int, _Seen] = {}

    def look(self, members: Mapping[int, Member | None]) -> None:
        """Takes the files of members as they are now; None: there is none.

        What is known of other members stays, and grows old.
        """
        now = time.monotonic()
        for k, member in members.items():
            seen = self._members.get(k)
            if member is None:
                self._members.pop(k, None)
            elif seen is None or seen.incarnation != member.incarnation:
                end = member.generation, member.end
                self._members[k] = _Seen(member.incarnation, member.beat, now, end, now)
            elif member.beat != seen.beat:
                if seen.end != (end := (member.generation, member.end)):
                    seen.end, seen.end_at = end, now
                seen.beat, seen.at = member.beat, now
                seen.has_grown, seen.is_refused = True, False
            elif now - max(seen.at, seen.asked_at) > _DOUBT_SECONDS and member.store:
                seen.asked_at = now
                seen.is_refused = k != self._own and _refuses(member.store)

    def ask(self, members: Mapping[int, Member]) -> None:
        """Asks now whether hosts know the ports of these members, before they are relied on."""
        for k, member in members.items():
            if k in self._members and k != self._own and member.store:
                self._members[k].is_refused = _refuses(member.store)

    def alive(self, taking_part: frozenset[int] = frozenset()) -> set[int]:
        """Returns the members that live.

        Args:
          taking_part: members that count as alive until they have been silent. Others count only
            once their beats have grown, because files of previous launches remain.
        """
        now = time.monotonic()
        return {
            k for k, seen in self._members.items()
            if k == self._own or (
                (seen.has_grown or k in taking_part) and not seen.is_refused
                and now - seen.at < SILENT_SECONDS
            )
        }

    def times(self) -> dict[int, float]:
        """Returns when each member was last heard of, in seconds of time.monotonic."""
        return {k: seen.at for k, seen in self._members.items()}

    def end_times(self) -> dict[int, float]:
        """Returns when each worker's end was first seen, in seconds of time.monotonic."""
        return {k: seen.end_at for k, seen in self._members.items() if seen.end[1] is not None}


def _refuses(address: str) -> bool:
    """Returns True if a host answers that nothing listens at its "host:port"."""
    with contextlib.suppress(OSError):
        try:
            socket.create_connection(addresses.split(address), timeout=0.3).close()
        except ConnectionRefusedError:
            return True
    return False
