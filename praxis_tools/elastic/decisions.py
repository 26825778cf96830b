"""Decides on the next action of an elastic job, as a pure function of the leader's view.

The leader is the live member with the lowest number. If two members lead at the same time, no harm
is done, because each generation can only be created once.
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

# After a worker has lost a peer, the leader waits this long to find out which process died. After
# workers have stopped, it waits this long for the process that joins.
CAUSE_SECONDS = 3.0
# The job ends after this many consecutive generations without a completed step.
MAX_FRUITLESS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """The leader's view of all members.

    Attributes:
      members: Maps the number of each member that has a file to the member.
      alive: Numbers of the members whose supervisors are alive.
      generation: The newest generation, or None if there is none yet.
      is_asked_to_stop: Whether the workers of the generation have been asked to stop.
      num_members: Number of members in the complete job.
      min_members: Minimum number of members in a generation.
      waited: Seconds since a member of a generation was last alive, or since the leader started.
      start_seconds: Seconds for which the first generation waits for all members.
      stuck: Maps the number of each member whose worker is stuck to the reason.
      stuck_seconds: Seconds for which the other workers have been waiting for stuck workers.
      seen: Time of each member's last heartbeat, in seconds of the leader's time.monotonic.
      now: The current time by the same clock.
      ended: Time at which the leader observed that a member's worker had exited, by the same clock.
        The default is the time in `seen`.
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
    """Decision to do nothing.

    Attributes:
      why: Description of what the job is waiting for, or "" if it is training.
    """

    why: str = ""


@dataclasses.dataclass(frozen=True)
class StopWorkers:
    """Decision to stop the workers after the current step, because a member joins or leaves."""

    why: str


@dataclasses.dataclass(frozen=True)
class StartGeneration:
    """Decision to start the next generation.

    Attributes:
      kind: Event that ended the previous generation; see `Generation`.
      who: Numbers of the members that caused the event.
      why: Description of the event.
      members: Numbers of the members in the next generation.
      event: Time of the event, in seconds of the leader's time.monotonic.
    """

    kind: str
    who: tuple[int, ...]
    why: str
    members: tuple[int, ...]
    event: float


@dataclasses.dataclass(frozen=True)
class EndJob:
    """Decision to end the job with an exit status."""

    status: int
    why: str


Decision = Wait | StopWorkers | StartGeneration | EndJob


def decide(view: View) -> Decision:
    """Returns the leader's next action.

    The cases in order: a worker refused to start, no generation is running, training is complete, a
    worker failed, all workers have stopped on request, and members are waiting to join or leave.
    """
    # The members that could be in the next generation.
    available = tuple(
        k
        for k in sorted(view.alive)
        if not view.members[k].is_leaving and not _is_backing_off(view, k)
    )
    for k in sorted(view.alive):
        end = view.members[k].end
        if end is not None and end.kind == REFUSED:
            return EndJob(end.status, f"{view.members[k]} {end.why}")
    last = view.generation
    if last is None or not any(_participates(view, last, k) for k in last.members):
        return _decide_first(view, available)
    # A member that has not joined this generation yet still has its previous end.
    ends = {
        k: end
        for k in last.members
        if _participates(view, last, k) and view.members[k].generation == last.number
        if (end := view.members[k].end) is not None
    }
    # If one worker has trained to the end, the others will too. Wait until they have exited.
    if trained := [end.status for end in ends.values() if end.kind == TRAINED]:
        running = [k for k in last.members if _participates(view, last, k) and k not in ends]
        return Wait() if running else EndJob(max(trained), "trained")
    joining = tuple(k for k in available if k not in last.members)
    leaving = tuple(k for k in last.members if k not in available)
    decision = _decide_after_failure(view, last, ends, joining, leaving, available)
    if decision is not None:
        return decision
    if len(ends) == len(last.members):  # All workers have stopped.
        return _decide_after_stop(view, last, joining, leaving, available)
    if not (joining or leaving) or view.is_asked_to_stop:
        return Wait()
    if not leaving and not has_stepped(view, last):
        return Wait()  # Let the generation complete a step before stopping it.
    return StopWorkers(_changes_text(view, joining, leaving))


def _participates(view: View, last: Generation, k: int) -> bool:
    """Returns whether a member is alive and has not restarted since the generation began."""
    member = view.members.get(k)
    return (
        member is not None
        and k in view.alive
        and member.incarnation == last.incarnations[last.members.index(k)]
        and member.generation <= last.number
    )


def _end_time(view: View, k: int) -> float:
    return view.ended.get(k, view.seen.get(k, view.now))


def _is_backing_off(view: View, k: int) -> bool:
    """Returns whether a member is still backing off after its worker has exited.

    The backoff begins when the leader observes that the worker has exited. The duration of the
    backoff is the difference between two times on the member's clock, so clocks of different hosts
    are never compared.
    """
    member = view.members[k]
    if member.end is None:
        return False
    return 0 <= view.now - _end_time(view, k) < member.rests_until - member.end.time


def _decide_first(view: View, available: tuple[int, ...]) -> Decision:
    """Returns the decision while no generation runs: at the start, or after all hosts have died."""
    if view.alive and not available and all(view.members[k].is_leaving for k in view.alive):
        return EndJob(0, "all processes have been asked to leave")
    num_missing = view.num_members - len(available)
    if num_missing and view.waited < view.start_seconds:
        return Wait()
    if len(available) < view.min_members:
        return Wait(_too_few_text(view, available))
    why = "all processes are available"
    if num_missing:
        why = f"{num_missing} of {view.num_members} processes did not start in time"
    return StartGeneration("start", (), why, available, view.now - view.waited)


def _decide_after_failure(
    view: View,
    last: Generation,
    ends: Mapping[int, WorkerEnd],
    joining: tuple[int, ...],
    leaving: tuple[int, ...],
    available: tuple[int, ...],
) -> Decision | None:
    """Returns the decision after a failure, or None if no process of the generation has failed.

    If a process dies, the other processes lose their connections to it and exit as well
    (LOST_PEER). They did not cause the failure, so their exits are only considered if no cause is
    found within CAUSE_SECONDS.
    """
    gone = [k for k in last.members if not _participates(view, last, k)]
    causes = {k: end for k, end in ends.items() if end.kind in (DIED, FAILED)}
    lost = {k: end for k, end in ends.items() if end.kind == LOST_PEER}
    if not (gone or causes or lost or view.stuck):
        return None
    if view.is_asked_to_stop and (joining or leaving) and not (gone or causes or view.stuck):
        # Some workers stopped on request before others had started training.
        return _decide_after_stop(view, last, joining, leaving, available)
    # In the order below: wait for the cause of lost connections, end the job if a retry would not
    # help, wait for more members, or start the next generation.
    failed = {k: end for k, end in causes.items() if end.kind == FAILED}
    times = [_end_time(view, k) for k in (*causes, *lost)]
    if lost and not (gone or causes or view.stuck):
        if 0 <= view.now - min(times) < CAUSE_SECONDS:
            return Wait()
        causes = lost
    # `last.kind` is the event that ended the previous generation, so this is the second failure.
    if failed and not gone and last.kind == "failed" and not has_stepped(view, last):
        k, end = min(failed.items())
        return EndJob(
            end.status,
            f"{view.members[k]} {end.why}, for the second time before the first step, so another "
            "retry would not help",
        )
    if last.num_fruitless >= MAX_FRUITLESS and not has_stepped(view, last):
        return EndJob(1, f"a process ended before the first step {MAX_FRUITLESS} times in a row")
    if len(available) < view.min_members:
        return Wait(_too_few_text(view, available))
    kind, who = "died", (*gone, *causes)
    reasons = [f"{_name(view, k)} was lost with its host" for k in gone]
    reasons += [f"{view.members[k]} {end.why}" for k, end in causes.items()]
    # Stuck workers have been stuck for a while, so the event is in the past.
    if view.stuck and not (gone or causes):
        kind, who = "stuck", tuple(view.stuck)
        reasons = [f"{view.members[k]} {why}" for k, why in view.stuck.items()]
        times.append(view.now - view.stuck_seconds)
    elif failed and not gone and len(failed) == len(causes):
        kind = "failed"
    times += [view.seen[k] for k in gone if k in view.seen]
    event = min(times, default=view.now)
    return StartGeneration(kind, tuple(sorted(who)), "; ".join(reasons), available, event)


def has_stepped(view: View, last: Generation) -> bool:
    """Returns whether any worker of the generation is known to have completed a step."""
    return any(
        view.members[k].generation == last.number and view.members[k].first_step_time is not None
        for k in last.members
        if k in view.members
    )


def _decide_after_stop(
    view: View,
    last: Generation,
    joining: tuple[int, ...],
    leaving: tuple[int, ...],
    available: tuple[int, ...],
) -> Decision:
    """Returns the decision after workers have stopped on request."""
    times = [
        _end_time(view, k)
        for k in last.members
        if k in view.members and view.members[k].end is not None
    ]
    if not (joining or leaving):
        if not view.is_asked_to_stop:
            return EndJob(0, "stopped")  # Stopped by a time limit or a signal to a worker.
        # The process that joins has asked for this itself, before it has sent enough heartbeats, or
        # has ended in the meantime.
        if 0 <= view.now - min(times, default=view.now) < CAUSE_SECONDS:
            return Wait()
    if not available:
        return EndJob(0, "all processes have been asked to leave")
    if len(available) < view.min_members:
        return Wait(_too_few_text(view, available))
    kind = "left" if leaving else "came"
    why = _changes_text(view, joining, leaving) or "the process that was about to join has ended"
    who = (*leaving, *joining)
    return StartGeneration(kind, who, why, available, min(times, default=view.now))


def _changes_text(view: View, joining: tuple[int, ...], leaving: tuple[int, ...]) -> str:
    changes = [f"{_name(view, k)} leaves" for k in leaving]
    changes += [f"{_name(view, k)} joins" for k in joining]
    return ", ".join(changes)


def _name(view: View, k: int) -> str:
    return str(view.members[k]) if k in view.members else f"process {k}"


def _too_few_text(view: View, available: tuple[int, ...]) -> str:
    processes = "1 process is" if len(available) == 1 else f"{len(available)} processes are"
    return (
        f"{processes} available, but --min_processes={view.min_members}; training continues when "
        "more processes join"
    )
