"""The next action of an elastic job: a pure function of the leader's view of all members.

The leader is the living member with the lowest number. Two members that both lead do no
harm: a generation's file is made once.
"""

import dataclasses
from collections.abc import Mapping, Set

from praxis_tools.elastic.members import (
    DIED,
    FAILED,
    LOST_PEER,
    REFUSED,
    TRAINED,
    Generation,
    Member,
    WorkerEnd,
)

# The wait after a process has lost another one, until it is known which.
CAUSE_SECONDS = 3.0
# So many generations in a row that made no step end the job.
MOST_FRUITLESS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The leader's view of all members.

    Attributes:
      members: all that have a file, by number.
      alive: those whose supervisors live.
      generation: the newest, or None.
      is_asked_to_stop: its workers were asked to.
      num_members: of the complete job.
      min_members: with fewer no generation begins.
      waited: seconds since this leader began to look.
      start_seconds: how long the first generation waits for all members.
      stuck: members of the generation whose workers do nothing, each with the reason.
      stuck_seconds: for how long the others have waited for them.
      seen: when each member was last heard of, in seconds of the leader's time.monotonic.
      now: the same clock, now.
      ended: when the leader first saw how a member's worker ended, by the same clock. Default:
        when the member was last heard of.
    """

    members: Mapping[int, Member]
    alive: Set[int]
    generation: Generation | None
    is_asked_to_stop: bool
    num_members: int
    min_members: int
    waited: float
    start_seconds: float
    stuck: Mapping[int, str]
    stuck_seconds: float
    seen: Mapping[int, float]
    now: float
    ended: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Wait:
    """Nothing is to be done; `why` is "" if all is well."""

    why: str = ""


@dataclasses.dataclass(frozen=True)
class Stop:
    """The workers are to stop after a step, for a member comes or leaves."""

    why: str


@dataclasses.dataclass(frozen=True)
class Begin:
    """The next generation begins with these members.

    Attributes:
      event: when the one before was broken, in seconds of the leader's time.monotonic.
    """

    kind: str
    who: tuple[int, ...]
    why: str
    members: tuple[int, ...]
    event: float


@dataclasses.dataclass(frozen=True)
class End:
    """The job ends with this status."""

    status: int
    why: str


Decision = Wait | Stop | Begin | End


def decide(view: View) -> Decision:
    """Returns the leader's next action."""
    willing = tuple(
        k for k in sorted(view.alive)
        if not view.members[k].is_leaving and not _rests(view, k)
    )
    for k in sorted(view.alive):
        end = view.members[k].end
        if end is not None and end.kind == REFUSED:
            return End(end.status, f"{view.members[k]} {end.why}")
    last = view.generation
    if last is None or not any(_is_in(view, k) for k in last.members):
        return _first(view, willing)
    ends = {
        k: view.members[k].end for k in last.members
        if _is_in(view, k) and view.members[k].generation == last.number
    }
    ends = {k: end for k, end in ends.items() if end is not None}
    if trained := [end.status for end in ends.values() if end.kind == TRAINED]:
        at_work = [k for k in last.members if _is_in(view, k) and k not in ends]
        return Wait() if at_work else End(max(trained), "trained")
    came = tuple(k for k in willing if k not in last.members)
    left = tuple(k for k in last.members if k not in willing)
    broken = _broken(view, ends, came, left, willing)
    if broken is not None:
        return broken
    if len(ends) == len(last.members):  # All stopped.
        return _after_stop(view, came, left, willing)
    if not (came or left) or view.is_asked_to_stop:
        return Wait()
    if not left and not has_stepped(view, last):
        return Wait()  # It would be stopped before it has done anything.
    return Stop(_changes(view, came, left))


def _is_in(view: View, k: int) -> bool:
    """Returns True if a member of the generation still has the supervisor that it had there."""
    last = view.generation
    member = view.members.get(k)
    return (
        member is not None and k in view.alive
        and member.incarnation == last.incarnations[last.members.index(k)]
        and member.generation <= last.number
    )


def _saw_end(view: View, k: int) -> float:
    return view.ended.get(k, view.seen.get(k, view.now))


def _rests(view: View, k: int) -> bool:
    """Returns True while a member's rest lasts, from when the leader saw its worker's end.

    Two times of the member's clock give the length: its clock is not compared with the leader's.
    """
    member = view.members[k]
    if member.end is None:
        return False
    return 0 <= view.now - _saw_end(view, k) < member.rests_until - member.end.time


def _first(view: View, willing: tuple[int, ...]) -> Decision:
    """Returns the decision where nobody works: a job begins, or all of its hosts were gone."""
    if view.alive and not willing and all(view.members[k].is_leaving for k in view.alive):
        return End(0, "all processes were asked to end")
    missing = view.num_members - len(willing)
    if missing and view.waited < view.start_seconds:
        return Wait()
    if len(willing) < view.min_members:
        return Wait(_too_few(view, willing))
    why = "all processes are there"
    if missing:
        why = f"{missing} of {view.num_members} processes did not come in time"
    return Begin("start", (), why, willing, view.now - view.waited)


def _broken(
    view: View, ends: Mapping[int, WorkerEnd], came: tuple[int, ...], left: tuple[int, ...],
    willing: tuple[int, ...],
) -> Decision | None:
    """Returns the decision if a process of the generation is gone; None: none is."""
    last = view.generation
    gone = [k for k in last.members if not _is_in(view, k)]
    causes = {k: end for k, end in ends.items() if end.kind in (DIED, FAILED)}
    lost = {k: end for k, end in ends.items() if end.kind == LOST_PEER}
    if not (gone or causes or lost or view.stuck):
        return None
    if view.is_asked_to_stop and (came or left) and not (gone or causes or view.stuck):
        # Some stopped before others had begun to train.
        return _after_stop(view, came, left, willing)
    failed = {k: end for k, end in causes.items() if end.kind == FAILED}
    times = [_saw_end(view, k) for k in (*causes, *lost)]
    if lost and not (gone or causes or view.stuck):
        if 0 <= view.now - min(times) < CAUSE_SECONDS:
            return Wait()
        causes = lost
    if failed and not gone and last.kind == "failed" and not has_stepped(view, last):
        k, end = min(failed.items())
        return End(end.status, f"{view.members[k]} {end.why}, again before a step was made, so "
                               "another try would not help")
    if last.num_fruitless >= MOST_FRUITLESS and not has_stepped(view, last):
        return End(1, f"{MOST_FRUITLESS} times in a row no step was made before a process was gone")
    if len(willing) < view.min_members:
        return Wait(_too_few(view, willing))
    kind, who = "died", (*gone, *causes)
    words = [f"{_name(view, k)} is gone with its host" for k in gone]
    words += [f"{view.members[k]} {end.why}" for k, end in causes.items()]
    if view.stuck and not (gone or causes):
        kind, who = "stuck", tuple(view.stuck)
        words = [f"{view.members[k]} {why}" for k, why in view.stuck.items()]
        times.append(view.now - view.stuck_seconds)
    elif failed and not gone and len(failed) == len(causes):
        kind = "failed"
    times += [view.seen[k] for k in gone if k in view.seen]
    event = min(times, default=view.now)
    return Begin(kind, tuple(sorted(who)), "; ".join(words), willing, event)


def has_stepped(view: View, last: Generation) -> bool:
    """Returns True if a worker of the generation has made a step, as far as can be seen."""
    return any(
        view.members[k].generation == last.number
        and view.members[k].first_step_time is not None
        for k in last.members if k in view.members
    )


def _after_stop(
    view: View, came: tuple[int, ...], left: tuple[int, ...], willing: tuple[int, ...]
) -> Decision:
    if not (came or left):
        return End(0, "stopped")  # By its time limit, or a signal to a worker.
    if not willing:
        return End(0, "all processes were asked to end")
    if len(willing) < view.min_members:
        return Wait(_too_few(view, willing))
    kind = "left" if left else "came"
    why = _changes(view, came, left)
    last = view.generation
    times = [_saw_end(view, k) for k in last.members
             if k in view.members and view.members[k].end is not None]
    return Begin(kind, (*left, *came), why, willing, min(times, default=view.now))


def _changes(view: View, came: tuple[int, ...], left: tuple[int, ...]) -> str:
    words = [f"{_name(view, k)} leaves" for k in left] + [f"{_name(view, k)} comes" for k in came]
    return ", ".join(words)


def _name(view: View, k: int) -> str:
    return str(view.members[k]) if k in view.members else f"process {k}"


def _too_few(view: View, willing: tuple[int, ...]) -> str:
    return (
        f"{len(willing)} of at least {view.min_members} processes are there (--min_processes); "
        "training goes on when more come"
    )
