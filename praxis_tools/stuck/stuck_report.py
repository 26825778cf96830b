"""Formats reports on stuck processes."""

from collections.abc import Callable

from praxis_tools.stuck.decision import Stuck
from praxis_tools.stuck.progress import MEETING, ON_DEVICES, Progress

# A report older than this may be outdated, because the process may have made progress since then.
_HEARD_SECONDS = 5.0


def paragraph(
    stuck: Stuck,
    name: Callable[[int], str],
    first_collective: Callable[[int], str],
) -> str:
    """Describes which processes are stuck, and where other processes wait for them.

    Args:
      stuck: The stuck processes.
      name: Function that takes the index of a process and returns "process 1 (its host)".
      first_collective: Function that takes the index of a process and describes the first
        collective of a training step that involves the devices of that process, or returns "" if it
        is unknown.
    """
    if not stuck.processes:
        return f"the job has made no progress for {stuck.seconds:.0f} s: {stuck.why}"
    names = " and ".join(name(item.process) for item in stuck.processes)
    verb = "is" if len(stuck.processes) == 1 else "are"
    return f"{names} {verb} stuck: {stuck.why}; {details(stuck, name, first_collective)}"


def details(
    stuck: Stuck,
    name: Callable[[int], str],
    first_collective: Callable[[int], str],
) -> str:
    """Describes the progress of the stuck processes, and where other processes wait for them.

    The arguments are the same as in `paragraph`.
    """
    where = "; ".join(dict.fromkeys(map(_where, stuck.processes)))
    if not stuck.waiting:
        return where
    waiting = " and ".join(name(item.process) for item in stuck.waiting[:3])
    if len(stuck.waiting) > 3:
        waiting = f"{len(stuck.waiting)} others"
    wait = "waits" if len(stuck.waiting) == 1 else "wait"
    them = "it" if len(stuck.processes) == 1 else "them"
    if stuck.processes[0].unheard_seconds > _HEARD_SECONDS:
        position = _position_of_observer(stuck, name, first_collective)
    else:
        position = _position_of_others(stuck, first_collective)
    return f"{where}; {waiting} {wait} for {them} for {stuck.seconds:.0f} s{position}"


def _where(progress: Progress) -> str:
    """Describes the activity of a process and its last step."""
    step_text = "no step yet" if progress.step is None else f"step {progress.step}"
    last = f"it has completed {step_text}"
    if progress.unheard_seconds > _HEARD_SECONDS:
        last = f"according to its last report, {last}"
    if progress.doing.endswith(ON_DEVICES):
        dispatched, is_step = progress.dispatched, progress.doing.startswith("step")
        step = f" step {dispatched}" if is_step and dispatched is not None else ""
        return f"{last} and waits for its own devices to finish{step or ' the dispatched work'}"
    return f"{last} and is in: {progress.doing or 'an unknown phase'}"


def _position_of_observer(
    stuck: Stuck, name: Callable[[int], str], first_collective: Callable[[int], str]
) -> str:
    """Describes where a process waits for a stuck process whose last report may be outdated."""
    observer = max(stuck.waiting, key=lambda progress: progress.arrived)
    text = f"; {name(observer.process)}: {_where(observer)}"
    collective = first_collective(stuck.processes[0].process)
    if collective and observer.doing == f"step{ON_DEVICES}":
        text += f"; a step's first collective that needs the stuck process's devices: {collective}"
    return text


def _position_of_others(stuck: Stuck, first_collective: Callable[[int], str]) -> str:
    """Describes where other processes wait; returns "" if it is unknown."""
    behind = stuck.processes[0]
    others = [other for other in stuck.waiting if other.arrived > behind.arrived]
    if not others:
        return ""
    phases = {other.doing for other in others}
    if phases == {MEETING}:
        return ", at a barrier on the hosts"
    if behind.doing.endswith(ON_DEVICES):
        return ""  # The devices run a step, but their position in the step is unknown.
    step = (behind.dispatched or 0) + 1
    # A resumed process may not have dispatched a step, so take the number from the others.
    ahead = [other.dispatched for other in others if other.dispatched is not None]
    if behind.dispatched is None and ahead:
        step = min(ahead)
    if not ahead or min(ahead) < step or phases != {f"step{ON_DEVICES}"}:
        return f", in: {' and '.join(sorted(phases))}"
    collective = first_collective(behind.process)
    if not collective:
        return f", in step {step}"
    return f", in step {step}'s first collective that needs its devices: {collective}"
