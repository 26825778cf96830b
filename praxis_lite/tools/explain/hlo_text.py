"""The text of a compiled program, parsed: its instructions, and how often each runs."""

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from praxis_lite.core.jaxprs import FURTHER_TURNS

if TYPE_CHECKING:
    import jax


class Array(NamedTuple):
    """The element type and dims of an array in a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Of an element."""
        bits = re.search(r"\d+", self.dtype)  # s4, bf16, f8e4m3fn; a token or opaque has none.
        return 8 if self.dtype == "pred" else int(bits.group(0)) if bits else 0

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.dims) * self.bits // 8)


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names; the literal of a parameter or a constant
    attributes: str
    is_root: bool


_Computation = dict[str, Instruction]


class Program(NamedTuple):
    """A module: its header line, its computations by name, and its tables of source lines."""

    header: str
    computations: dict[str, _Computation]
    entry: str
    tables: dict[str, dict[int, str]]


def parse(compiled: "jax.stages.Compiled | str") -> Program:
    """Returns the program of a `Compiled` or its text; raises ValueError if that is no HLO."""
    return _parse(compiled if isinstance(compiled, str) else compiled.as_text())


@lru_cache(maxsize=4)
def _parse(text: str) -> Program:
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    if header is None:
        raise ValueError(f"Not the text of an HLO module: {text[:80]!r}; pass compiled.as_text().")
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in _lines(text[header.end() :]):
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*\) -> .*)?\{$", line):
            current = computations.setdefault(opening.group(2), {})
            entry = opening.group(2) if opening.group(1) else entry
        elif current is not None and (head := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)):
            current[head.group(2)] = _instruction(head, re.sub(r"/\*index=\d+\*/", "", line))
    return Program(header.group(0), computations, entry, _tables(text))


def _lines(text: str) -> Iterator[str]:
    """Yields lines; an attribute of Pallas (kernel_metadata) on several lines is joined."""
    parts: list[str] = []
    for line in text.splitlines():
        depth = sum(part.count("{") - part.count("}") for part in parts)
        if parts and (line.startswith('"') or (depth > 0 and line.startswith("}"))):
            parts.append(line)
            continue
        if parts:
            yield "".join(parts)
        # Only an instruction goes on: its line is indented, and has open braces at its end.
        parts = [line]
        if not (line.startswith("  ") and line.endswith("{")):
            yield line
            parts = []
    if parts:
        yield "".join(parts)


def _tables(text: str) -> dict[str, dict[int, str]]:
    tables = {}
    for name in ("FileNames", "FileLocations", "StackFrames"):
        result = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        rows = (row.split(" ", 1) for row in result.group(1).splitlines()) if result else ()
        tables[name] = {int(number): row for number, row in rows}
    return tables


def _instruction(head: re.Match, line: str) -> Instruction:
    start = head.end()
    end = bracket(line, start)[1] if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    operands, close = bracket(line, opening)
    # An operand is 'f32[7]{0} %name' or '%name'.
    names = tuple(operand.split(" ")[-1].lstrip("%") for operand in operands)
    opcode = line[end:opening].strip()
    return Instruction(
        head.group(2), line[start:end], opcode, names, line[close:], bool(head.group(1))
    )


def bracket(text: str, start: int) -> tuple[list[str], int]:
    """Returns the parts, between commas, of the bracket at `start`, and the place after it."""
    parts, depth, begin = [], 0, start + 1
    for mark in re.compile(r'[(){}\[\],]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += (mark.group(0) in "([{") - (mark.group(0) in ")]}")
        if depth == 0 or (depth == 1 and mark.group(0) == ","):
            parts.append(text[begin : mark.start()].strip())
            begin = mark.end()
        if depth == 0:
            return [part for part in parts if part], begin
    raise ValueError(f"Unbalanced brackets in HLO text: {text[start : start + 80]!r}")


def braced(text: str, key: str) -> str:
    """Returns the braces behind `key`, or an empty string."""
    start = text.find(key + "{") + len(key)
    return text[start : bracket(text, start)[1]] if start >= len(key) else ""


def arrays_of(shape: str) -> list[Array]:
    """Returns the arrays of a shape: itself, or the elements of a tuple."""
    return [
        Array(dtype, tuple(int(dim) for dim in re.findall(r"\d+", dims)))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    ]


def op_name_of(instruction: Instruction) -> str:
    """Returns the JAX operation that an instruction comes from, or an empty string."""
    result = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return result.group(1) if result else ""


class Site(NamedTuple):
    """An instruction where it runs, and how often in a run of the program."""

    instruction: Instruction
    computation: _Computation
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


def callees(instruction: Instruction, key: str) -> list[str]:
    """Returns the computations that an attribute of an instruction names."""
    result = re.search(rf" {key}=(\{{[^}}]*\}}|[%\w.\-]+)", instruction.attributes)
    return re.findall(r"[\w.\-]+", result.group(1)) if result else []


# A scalar in a loop: (element of the loop's state or None, constant to add to it).
_Affine = tuple[int | None, int]
_STATE: _Affine = (-1, 0)  # the state itself, a tuple


def trip_count(program: Program, computation: _Computation, loop: Instruction) -> int | None:
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


def root_of(computation: _Computation) -> Instruction:
    """Returns the instruction that a computation returns."""
    return next(item for item in computation.values() if item.is_root)


def _comparison(
    program: Program, computation: _Computation, argument: Callable[[int], _Affine | None]
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
    program: Program, computation: _Computation, name: str,
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


def _called(program: Program, item: Instruction) -> _Computation:
    return program.computations[(callees(item, "calls") or callees(item, "to_apply"))[0]]
