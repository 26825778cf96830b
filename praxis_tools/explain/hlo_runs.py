"""Counts the executions of each instruction in a program, using the trip counts of loops."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from praxis_lite.core.jaxprs import EXTRA_ROUNDS
from praxis_tools.explain.hlo_text import (
    Computation,
    Instruction,
    Program,
    callees,
    op_name_of,
    root_of,
)


class Site(NamedTuple):
    """An instruction, together with one chain of calls that executes it.

    Attributes:
      instruction: The instruction.
      computation: Computation that contains the instruction.
      num_runs: Number of executions of the instruction in one run of the program.
      at_least: Whether `num_runs` assumes one iteration of a loop with an unknown trip count.
      at_most: Whether `num_runs` assumes that a branch is taken.
      scope: Names of the enclosing loops, branches and calls.
      fused: Whether the instruction is inside a fusion.
    """

    instruction: Instruction
    computation: Computation
    num_runs: int
    at_least: bool
    at_most: bool
    scope: tuple[str, ...]
    fused: bool


def executed(program: Program) -> Iterator[Site]:
    """Yields all instructions executed in one run, including those in loops, calls and fusions."""
    entry = program.computations[program.entry]
    return _walk(program, Site(root_of(entry), entry, 1, False, False, (), False))


def _walk(program: Program, any_site: Site) -> Iterator[Site]:
    """Yields the sites in the computation of `any_site` and in all computations it calls."""
    for instruction in any_site.computation.values():
        site = any_site._replace(instruction=instruction)
        yield site
        for key, changes in _calls(program, site):
            for callee in callees(instruction, key):
                inside = {"scope": (*site.scope, instruction.name, callee), **changes}
                computation = program.computations[callee]
                yield from _walk(program, site._replace(computation=computation, **inside))


def _calls(program: Program, site: Site) -> list[tuple[str, dict]]:
    """Returns the attributes that name a site's callees, and the `Site` fields they change."""
    opcode = site.instruction.opcode
    if opcode == "while":
        trips = trip_count(program, site.computation, site.instruction)
        at_least = site.at_least or trips is None
        if trips is None:
            trips_of_body = 0 if is_extra_exchange(program, site.instruction) else 1
        else:
            trips_of_body = trips
        # The condition is evaluated one more time than the body.
        runs = {"condition": (trips or 0) + 1, "body": trips_of_body}
        return [
            (key, {"num_runs": site.num_runs * number, "at_least": at_least})
            for key, number in runs.items()
        ]
    if opcode == "conditional":
        keys = ("branch_computations", "true_computation", "false_computation")
        return [(key, {"at_most": True}) for key in keys]
    if opcode in ("fusion", "fusion-start"):
        return [("calls", {"scope": site.scope, "fused": True})]
    if opcode in ("call", "async-start", "custom-call"):
        # Ignore async-done, which names the same computation, and `to_apply` of reductions.
        return [(key, {}) for key in ("calls", "to_apply", "called_computations")]
    return []


# A scalar in a loop: (i, c) is element i of the loop state plus the constant c; (None, c) is c.
_Affine = tuple[int | None, int]
_STATE: _Affine = (-1, 0)  # Stands for the loop state, which is a tuple.


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a while loop, or None if it cannot be determined.

    Skip this on a first read: it recognizes `for (i = initial; i < limit; i += step)`.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known.group(1))
    # TPU programs do not contain the trip count, so derive it from initial value, limit and step.
    condition = program.computations[callees(loop, "condition")[0]]
    body = program.computations[callees(loop, "body")[0]]
    comparison = _comparison(program, condition, lambda _: _STATE)
    state, next_state = computation.get(loop.operands[0]), root_of(body)
    if comparison is None or state is None or {state.opcode, next_state.opcode} != {"tuple"}:
        return None

    def initial(index: int) -> int | None:
        value = _scalar(program, computation, state.operands[index], lambda _: None)
        return value[1] if value and value[0] is None else None

    def step(index: int) -> int | None:
        value = _scalar(program, body, next_state.operands[index], lambda _: _STATE)
        return value[1] if value and value[0] == index else None

    # Swap the sides if needed, so that the counter is on the left and a fixed limit on the right.
    left, right, direction = comparison
    if left[0] is None or step(left[0]) == 0:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left[0] is None or (right[0] is not None and step(right[0]) != 0):
        return None
    start, by = initial(left[0]), step(left[0])
    limit = 0 if right[0] is None else initial(right[0])
    if start is None or limit is None or not by:
        return None
    # The loop runs while counter + left[1] < limit + right[1] (or another direction).
    distance = limit + right[1] - start - left[1]
    distance += {"LE": 1, "GE": -1}.get(direction, 0)
    stops = {"LT": by > 0, "LE": by > 0, "GT": by < 0, "GE": by < 0, "NE": distance % by == 0}
    return max(0, -(-distance // by)) if stops.get(direction) else None


def is_extra_exchange(program: Program, loop: Instruction) -> bool:
    """Returns whether a loop contains the extra all-to-all rounds for uneven expert loads."""
    body = program.computations[callees(loop, "body")[0]].values()
    return any(EXTRA_ROUNDS in op_name_of(instruction) for instruction in (loop, *body))


def _comparison(
    program: Program, computation: Computation, argument: Callable[[int], _Affine | None]
) -> tuple[_Affine, _Affine, str] | None:
    root = root_of(computation)

    def operand(index: int) -> _Affine | None:
        return _scalar(program, computation, root.operands[index], argument)

    if root.opcode in ("fusion", "call"):
        return _comparison(program, _called(program, root), operand)
    direction = re.search(r"direction=(\w+)", root.attributes)
    if direction is None:
        return None
    left, right = operand(0), operand(1)
    return (left, right, direction.group(1)) if left and right else None


def _scalar(
    program: Program,
    computation: Computation,
    name: str,
    argument: Callable[[int], _Affine | None],
) -> _Affine | None:
    """Expresses a scalar in terms of the loop state; returns None if it is not affine.

    Args:
      program: Program that contains the computation.
      computation: Computation that contains the scalar.
      name: Name of the instruction that computes the scalar.
      argument: Function that takes the index of a parameter and returns its value.
    """
    instruction = computation[name]

    def operand(index: int) -> _Affine | None:
        return _scalar(program, computation, instruction.operands[index], argument)

    if instruction.opcode == "constant":
        literal = instruction.operands[0]
        return (None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
    if instruction.opcode == "parameter":
        return argument(int(instruction.operands[0]))
    if instruction.opcode in ("copy", "bitcast", "reshape", "convert"):
        return operand(0)
    if instruction.opcode == "get-tuple-element":
        match = re.search(r"index=(\d+)", instruction.attributes)
        assert match is not None, instruction
        index = int(match.group(1))
        # The computation may have built the tuple itself.
        source = computation[instruction.operands[0]]
        if source.opcode == "tuple":
            return _scalar(program, computation, source.operands[index], argument)
        return (index, 0) if operand(0) == _STATE else None
    if instruction.opcode in ("add", "subtract"):
        left, right = operand(0), operand(1)
        if instruction.opcode == "subtract" and right is not None:
            right = (None, -right[1]) if right[0] is None else None
        # A sum of two elements of the loop state is not of the form (i, c).
        if left is None or right is None or None not in (left[0], right[0]):
            return None
        return (left[0] if right[0] is None else right[0]), left[1] + right[1]
    # Inline the computation, whose parameters are the operands.
    if instruction.opcode in ("fusion", "call"):
        callee = _called(program, instruction)
        return _scalar(program, callee, root_of(callee).name, operand)
    return None


def _called(program: Program, instruction: Instruction) -> Computation:
    names = callees(instruction, "calls") or callees(instruction, "to_apply")
    return program.computations[names[0]]
