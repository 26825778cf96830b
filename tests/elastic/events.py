"""Events of hosts (deaths, stops and returns), some of them aimed at an activity of the job."""

import dataclasses
import random
import time
from collections.abc import Callable, Iterable

from tests.elastic.hosts import Hosts, wait_for

# Activities reported by workers (goodput time categories), at which a death can be aimed.
SAVE, EVALUATION, RESTORE, COMPILE, CONNECT, STEP = (
    "save",
    "evaluation",
    "restore",
    "compile",
    "connect",
    "step",
)
_AIM_SECONDS = 60.0
# Time limit for a host to end after it was asked to leave or was replaced.
_END_SECONDS = 60.0
# Supervisors consider a host dead after 12 s of silence.
_BLINK_SECONDS, _SLEEP_SECONDS = (0.5, 4.0), (14.0, 20.0)


@dataclasses.dataclass(frozen=True)
class Happened:
    """An event, and the expected reaction of the job.

    Attributes:
      what: Description of the event.
      who: Numbers of the hosts.
      at: Time of the event, in Unix seconds.
      during: Activity of the job at that time, according to its files.
      needed: Hosts that must be in the next generation.
      allowed: Hosts that may be in the next generation.
      changes_hands: Whether the event must start a new generation. If False, the job may continue
        in the same generation.
      failures: Messages about failures in the event itself.
    """

    what: str
    who: tuple[int, ...]
    at: float
    during: str
    needed: frozenset[int]
    allowed: frozenset[int]
    changes_hands: bool = True
    failures: tuple[str, ...] = ()


class Events:
    """Triggers events of the hosts of a job.

    Args:
      hosts: The hosts of the job.
      rng: Random generator that chooses hosts, times and pauses.

    Attributes:
      away: Hosts whose processes have all ended.
      asleep: Hosts whose processes are all stopped.
      trigger: Event that started a generation, so that the next event could be aimed at a phase of
        this generation.
    """

    def __init__(self, hosts: Hosts, rng: random.Random):
        self.hosts, self.rng = hosts, rng
        self.away: set[int] = set()
        self.asleep: set[int] = set()
        self.trigger: Happened | None = None

    @property
    def present(self) -> set[int]:
        """The numbers of the hosts that participate or could participate."""
        return set(range(len(self.hosts.hosts))) - self.away - self.asleep

    def losses(self) -> dict[str, tuple[float, Callable[[], Happened]]]:
        """Returns the possible losses as (weight, triggering function), keyed by name."""
        kinds: dict[str, tuple[float, Callable[[], Happened]]] = {
            "a host is suspended briefly": (3, self.blink),
            "a spare worker dies": (2, self.kill_spare),
            "a worker dies": (8, self.kill_worker),
            "a worker hangs": (4, self.hang_worker),
        }
        if len(self.present) < 2:
            return kinds
        kinds |= {
            "a host dies": (14, self.kill_host),
            "the first host dies": (8, self.kill_first),
            "a host leaves on request": (8, self.take_host),
            "a host hangs": (6, self.stop_host),
            **{
                f"a host dies, aimed at {phase}": (7, lambda phase=phase: self.kill_host_in(phase))
                for phase in (SAVE, EVALUATION, RESTORE, COMPILE, CONNECT)
            },
        }
        if len(self.present) > 2:
            kinds["two hosts die at once"] = (8, self.kill_two)
        return kinds

    def returns(self) -> dict[str, tuple[float, Callable[[], Happened]]]:
        """Returns the possible returns, in the same form as `losses`."""
        kinds: dict[str, tuple[float, Callable[[], Happened]]] = {}
        if self.away:
            kinds["a host returns"] = (6, self.come_back)
        if len(self.away) > 1:
            kinds["all hosts return"] = (3, self.all_come_back)
        if self.asleep:
            kinds["a host resumes"] = (4, self.wake)
            kinds["a host is restarted"] = (2, self.start_anew)
            kinds["a host is replaced, then resumes"] = (3, self.replace)
        return kinds

    # Losses.

    def kill_host(self, victim: int | None = None) -> Happened:
        return self._killed("a host dies", [self._one() if victim is None else victim])

    def kill_first(self) -> Happened:
        return self._killed("the first host dies", [min(self.present)])

    def kill_two(self, phase: str = "") -> Happened:
        if phase:
            self._aim(phase)
        return self._killed("two hosts die at once", self.rng.sample(sorted(self.present), 2))

    def kill_host_in(
        self,
        phase: str,
        victim: int | None = None,
        trigger: Callable[[], Happened] | None = None,
    ) -> Happened:
        """Kills a host in a phase. If needed, `trigger` first starts a new generation."""
        self._aim(phase, trigger)
        victim = self._one() if victim is None else victim
        return self._killed(f"a host dies, aimed at {phase}", [victim])

    def kill_worker(self, victim: int | None = None) -> Happened:
        victim, during = self._one() if victim is None else victim, self._now()
        at = self.hosts[victim].kill_worker()
        return self._happened("a worker dies", [victim], at, during)

    def kill_spare(self) -> Happened:
        victim = self._one()
        wait_for(lambda: len(self.hosts[victim].workers()) > 1, _AIM_SECONDS)
        during = self._now()
        at = self.hosts[victim].kill_worker(1)
        return self._happened("a spare worker dies", [victim], at, during, changes_hands=False)

    def hang_worker(self, victim: int | None = None) -> Happened:
        victim, during = self._one() if victim is None else victim, self._now()
        at = self.hosts[victim].stop_worker()
        return self._happened("a worker hangs", [victim], at, during)

    def blink(self) -> Happened:
        victim = self._one()
        during = self._now()
        self.hosts[victim].stop()
        time.sleep(self.rng.uniform(*_BLINK_SECONDS))
        at = self.hosts[victim].go_on()
        return self._happened(
            "a host is suspended briefly", [victim], at, during, changes_hands=False
        )

    def stop_host(self) -> Happened:
        victim, during = self._one(), self._now()
        at = self.hosts[victim].stop()
        self.asleep.add(victim)
        return self._happened("a host hangs", [victim], at, during)

    def take_host(self) -> Happened:
        victim, during = self._one(), self._now()
        at = self.hosts[victim].ask_to_leave()
        self.away.add(victim)
        return self._happened("a host leaves on request", [victim], at, during)

    # Returns.

    def come_back(self) -> Happened:
        return self._started("a host returns", [self.rng.choice(sorted(self.away))])

    def all_come_back(self) -> Happened:
        return self._started("all hosts return", sorted(self.away))

    def wake(self) -> Happened:
        victim = self.rng.choice(sorted(self.asleep))
        during = self._now()
        at = self.hosts[victim].go_on()
        self.asleep.remove(victim)
        return self._happened("a host resumes", [victim], at, during, needed=[victim])

    def start_anew(self) -> Happened:
        victim = self.rng.choice(sorted(self.asleep))
        self.hosts[victim].kill()
        self.asleep.remove(victim)
        self.away.add(victim)
        return self._started("a host is restarted", [victim])

    def replace(self) -> Happened:
        victim = self.rng.choice(sorted(self.asleep))
        self.hosts[victim].replace()
        self.asleep.remove(victim)
        self.away.add(victim)
        happened = self._started("a host is replaced, then resumes", [victim])
        time.sleep(self.rng.uniform(0, 10))
        self.hosts[victim].wake_replaced()
        if wait_for(lambda: self.hosts[victim].status_of_replaced() is not None, _END_SECONDS):
            return happened
        return dataclasses.replace(happened, failures=("the replaced host has not exited",))

    def _one(self) -> int:
        return self.rng.choice(sorted(self.present))

    def _killed(self, what: str, victims: list[int]) -> Happened:
        during = self._now()
        at = min(self.hosts[k].kill() for k in victims)
        self.away |= set(victims)
        return self._happened(what, victims, at, during)

    def _started(self, what: str, victims: list[int]) -> Happened:
        failures = tuple(
            f"host {victim} was asked to leave, but has not exited"
            for victim in victims
            if not wait_for(lambda victim=victim: not self.hosts[victim].runs, _END_SECONDS)
        )
        for victim in victims:
            self.hosts[victim].end()
        during = self._now()
        at = min(self.hosts[k].start() for k in victims)
        self.away -= set(victims)
        happened = self._happened(what, victims, at, during, needed=victims)
        return dataclasses.replace(happened, failures=failures)

    def _happened(
        self,
        what: str,
        who: Iterable[int],
        at: float,
        during: str,
        *,
        needed: Iterable[int] = (),
        changes_hands: bool = True,
    ) -> Happened:
        return Happened(
            what, tuple(who), at, during, frozenset(needed), frozenset(self.present), changes_hands
        )

    def _aim(self, phase: str, trigger: Callable[[], Happened] | None = None) -> None:
        """Waits until the job is in `phase`. Most phases only occur in a new generation."""
        if phase in (SAVE, EVALUATION):
            wait_for(lambda: self._now() == phase, _AIM_SECONDS, 0.01)
            return
        before = self.hosts.generation()["number"]
        if trigger is None:
            comes = bool(self.away) and self.rng.random() < 0.5
            trigger = self.come_back if comes else self.kill_worker
        self.trigger = trigger()
        wait_for(
            lambda: self.hosts.generation()["number"] > before and self._now() in (phase, STEP),
            _AIM_SECONDS,
            0.01,
        )
        if phase == COMPILE:
            time.sleep(self.rng.uniform(0, 1))

    def _now(self) -> str:
        """Returns the activity of the job, as reported by its first worker."""
        if self.hosts.saves():
            return SAVE
        return next(filter(None, map(self.hosts.doing, sorted(self.present))), "")
