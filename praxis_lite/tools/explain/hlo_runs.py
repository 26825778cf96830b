"""How often each instruction of a compiled program runs: its loops' trips, and its calls."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from praxis_lite.core.jaxprs import FURTHER_TURNS
from praxis_lite.tools.explain.hlo_text import (
    Computation,
    Instruction,
    Program,
    callees,
    op_name_of,
    root_of,
)


class Site(NamedTuple):
    """An instruction where it runs, and how often in a run of the program."""

    instruction: Instruction
    computation: Computation
    count: int
    at_least: bool
    at_most: bool
    scope: tuple[str, ...]  # the loops, branches and calls around it
    fused: bool


def executed(program: Program) -> Iterator[Site]:
    """Yields every instruction that a run reaches, through loops, branches, calls and fusions."""
    entry = program.computations[program.entry]
    return _walk(program, Site(root_of(entry), entry, 1, False, False, (), False))


def _walk(program: Program, like: Site) -> Iterator[Site]:
    """Yields the sites that a computation reaches; `like` is a site in it."""
    for item in like.computation.values():
        site = like._replace(instruction=item)
        yield site
        for key, changes in _calls(program, site):
            for callee in callees(item, key):
                inside = {"scope": (*site.scope, item.name, callee), **changes}
                computation = program.computations[callee]
                yield from _walk(program, site._replace(computation=computation, **inside))


def _calls(program: Program, site: Site) -> list[tuple[str, dict]]:
    """Returns the attributes that name a site's calls, with the fields of `Site` that change."""
    opcode = site.instruction.opcode
    if opcode == "while":
        trips = trip_count(program, site.computation, site.instruction)
        at_least = site.at_least or trips is None
        at_all = 0 if is_of_uneven_loads(program, site.instruction) else 1
        # The condition is asked once more, to be told no.
        turns = {"condition": (trips or 0) + 1, "body": at_all if trips is None else trips}
        return [
            (key, {"count": site.count * number, "at_least": at_least})
            for key, number in turns.items()
        ]
    if opcode == "conditional":
        keys = ("branch_computations", "true_computation", "false_computation")
        return [(key, {"at_most": True}) for key in keys]
    if opcode in ("fusion", "fusion-start"):
        return [("calls", {"scope": site.scope, "fused": True})]
    if opcode in ("call", "async-start", "custom-call"):
        # Not async-done, which names the same computation; nor the `to_apply` of reductions.
        return [(key, {}) for key in ("calls", "to_apply", "called_computations")]
    return []


# A scalar in a loop: (element of the loop's state or None, constant to add to it).
_Affine = tuple[int | None, int]
_STATE: _Affine = (-1, 0)  # the state itself, a tuple


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often a while loop runs its body, or None if the program does not tell."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known.group(1))
    # A TPU's text does not say. Read `for (i = initial; i < limit; i += step)` from the program.
    condition = program.computations[callees(loop, "condition")[0]]
    body = program.computations[callees(loop, "body")[0]]
    compared = _comparison(program, condition, lambda _: _STATE)
    state, stepped = computation.get(loop.operands[0]), root_of(body)
    if compared is None or state is None or {state.opcode, stepped.opcode} != {"tuple"}:
        return None

    def initial(index: int) -> int | None:
        value = _scalar(program, computation, state.operands[index], lambda _: None)
        return value[1] if value and value[0] is None else None

    def step(index: int) -> int | None:
        value = _scalar(program, body, stepped.operands[index], lambda _: _STATE)
        return value[1] if value and value[0] == index else None

    left, right, direction = compared
    if left[0] is None or step(left[0]) == 0:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left[0] is None or (right[0] is not None and step(right[0]) != 0):
        return None
    start, by = initial(left[0]), step(left[0])
    limit = 0 if right[0] is None else initial(right[0])
    if start is None or limit is None or not by:
        return None
    distance = limit + right[1] - start - left[1]
    distance += {"LE": 1, "GE": -1}.get(direction, 0)
    stops = {"LT": by > 0, "LE": by > 0, "GT": by < 0, "GE": by < 0, "NE": distance % by == 0}
    return max(0, -(-distance // by)) if stops.get(direction) else None


def is_of_uneven_loads(program: Program, loop: Instruction) -> bool:
    """Returns True if a loop takes the turns that only uneven loads of experts need."""
    body = program.computations[callees(loop, "body")[0]].values()
    return any(FURTHER_TURNS in op_name_of(item) for item in (loop, *body))


def _comparison(
    program: Program, computation: Computation, argument: Callable[[int], _Affine | None]
) -> tuple[_Affine, _Affine, str] | None:
    root = root_of(computation)

    def operand(index: int) -> _Affine | None:
        return _scalar(program, computation, root.operands[index], argument)

    if root.opcode in ("fusion", "call"):
        return _comparison(program, _called(program, root), operand)
    direction = re.search(r"direction=(\w+)", root.attributes)
    left, right = (operand(0), operand(1)) if direction else (None, None)
    return (left, right, direction.group(1)) if left and right else None


def _scalar(
    program: Program, computation: Computation, name: str,
    argument: Callable[[int], _Affine | None],
) -> _Affine | None:
    item = computation[name]

    def operand(index: int) -> _Affine | None:
        return _scalar(program, computation, item.operands[index], argument)

    if item.opcode == "constant":
        return (None, int(item.operands[0])) if re.fullmatch(r"-?\d+", item.operands[0]) else None
    if item.opcode == "parameter":
        return argument(int(item.operands[0]))
    if item.opcode in ("copy", "bitcast", "reshape", "convert"):
        return operand(0)
    if item.opcode == "get-tuple-element":
        index = int(re.search(r"index=(\d+)", item.attributes).group(1))
        source = computation[item.operands[0]]
        if source.opcode == "tuple":
            return _scalar(program, computation, source.operands[index], argument)
        return (index, 0) if operand(0) == _STATE else None
    if item.opcode in ("add", "subtract"):
        left, right = operand(0), operand(1)
        if item.opcode == "subtract" and right is not None:
            right = (None, -right[1]) if right[0] is None else None
        if left is None or right is None or None not in (left[0], right[0]):
            return None
        return (left[0] if right[0] is None else right[0]), left[1] + right[1]
    if item.opcode in ("fusion", "call"):
        callee = _called(program, item)
        return _scalar(program, callee, root_of(callee).name, operand)
    return None


def _called(program: Program, item: Instruction) -> Computation:
    return program.computations[(callees(item, "calls") or callees(item, "to_apply"))[0]]
