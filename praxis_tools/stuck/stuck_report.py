"""Writes the paragraph that tells users which process is stuck."""

from collections.abc import Callable

from praxis_tools.stuck.decision import Stuck
from praxis_tools.stuck.progress import MEETING, ON_DEVICES, Progress

# A process that has reported nothing for longer may have made progress meanwhile.
_HEARD_SECONDS = 5.0


def paragraph(
    stuck: Stuck, name: Callable[[int], str], first_collective: Callable[[int], str],
) -> str:
    """Returns which processes are stuck, where and since when, and where the others wait.

    Args:
      stuck: The stuck processes.
      name: Returns "process 1 (its host)" for the index of a process.
      first_collective: Returns a description of the first collective of a training step that needs
        the devices of a process, given its index; "" if it is unknown.
    """
    if not stuck.processes:
        return f"no process is to blame, but nothing goes on for {stuck.seconds:.0f} s: {stuck.why}"
    names = " and ".join(name(item.process) for item in stuck.processes)
    verb = "is" if len(stuck.processes) == 1 else "are"
    return f"{names} {verb} stuck: {stuck.why}; {details(stuck, name, first_collective)}"


def details(
    stuck: Stuck, name: Callable[[int], str], first_collective: Callable[[int], str],
) -> str:
    """Returns the progress of the stuck processes, and where the others wait.

    The arguments are those of `paragraph`.
    """
    where = "; ".join(dict.fromkeys(map(_where, stuck.processes)))
    if not stuck.waiting:
        return where
    waiting = " and ".join(name(item.process) for item in stuck.waiting[:3])
    if len(stuck.waiting) > 3:
        waiting = f"{len(stuck.waiting)} others"
    wait = "waits" if len(stuck.waiting) == 1 else "wait"
    them = "it" if len(stuck.processes) == 1 else "them"
    is_unheard = stuck.processes[0].unheard_seconds > _HEARD_SECONDS
    in_what = (_perhaps_in_what if is_unheard else _in_what)(stuck, name, first_collective)
    return f"{where}; {waiting} {wait} for {them} for {stuck.seconds:.0f} s{in_what}"


def _where(progress: Progress) -> str:
    """Returns the activity of a process and its last step."""
    last = f"it has ended {'no step yet' if progress.step is None else f'step {progress.step}'}"
    if progress.unheard_seconds > _HEARD_SECONDS:
        last = f"as it said last, {last}"
    if progress.doing.endswith(ON_DEVICES):
        at = progress.dispatched
        step = f" step {at}" if progress.doing.startswith("step") and at is not None else ""
        return f"{last} and waits for its own devices to end{step or ' what they were given'}"
    return f"{last} and is in: {progress.doing or 'something that it does not tell'}"


def _perhaps_in_what(
    stuck: Stuck, name: Callable[[int], str], first_collective: Callable[[int], str]
) -> str:
    """Returns where an observer waits for a process whose last report may be outdated."""
    observer = max(stuck.waiting, key=lambda item: item.arrived)
    words = f"; {name(observer.process)}: {_where(observer)}"
    collective = first_collective(stuck.processes[0].process)
    if collective and observer.doing == f"step{ON_DEVICES}":
        words += f"; a step's first collective that needs the stuck one's devices: {collective}"
    return words


def _in_what(
    stuck: Stuck, name: Callable[[int], str], first_collective: Callable[[int], str]
) -> str:
    """Returns where the others wait, or "" if it is unknown."""
    item = stuck.processes[0]
    others = [other for other in stuck.waiting if other.arrived > item.arrived]
    if not others:
        return ""
    doing = {other.doing for other in others}
    if doing == {MEETING}:
        return ", at a barrier on the hosts"
    if item.doing.endswith(ON_DEVICES):
        return ""  # Its devices run the program, and their position in it is unknown.
    step = (item.dispatched or 0) + 1
    # A resumed process may not have dispatched a step, so take the number from the others.
    ahead = [other.dispatched for other in others if other.dispatched is not None]
    if item.dispatched is None and ahead:
        step = min(ahead)
    if not ahead or min(ahead) < step or doing != {f"step{ON_DEVICES}"}:
        return f", in: {' and '.join(sorted(doing))}"
    collective = first_collective(item.process)
    if not collective:
        return f", in step {step}"
    return f", in step {step}'s first collective that needs its devices: {collective}"
