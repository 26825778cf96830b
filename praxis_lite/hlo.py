"""What a compiled program does on one device, read from its text: collectives, matmuls, memory.

XLA's `cost_analysis()` counts a loop's body once, so a scanned model looks like one layer. Here an
instruction counts as often as its loops run it. `compiled` is a `jax.stages.Compiled` or its
`as_text()`; the text of jax 0.10 to 0.12 for CPU and TPU is understood, cuBLAS's calls too.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        bytes: of one execution's result on one device, all elements of a tuple together.
        dtypes: element types of the result, each once, in XLA's names ('f32', 'bf16').
        count: executions in one run of the program.
        at_least: in a loop whose trip count the program does not tell; `count` takes one pass.
        at_most: in a branch that may not be taken; `count` takes it as taken.
        group_size: devices in one group; None for collective-permute.
        op_name: the JAX operation it comes from, 'jit(step)/while/body/layer/dot_general', or ''.
    """

    kind: str
    bytes: int
    dtypes: tuple[str, ...]
    count: int
    at_least: bool
    at_most: bool
    group_size: int | None
    op_name: str


@dataclass(frozen=True)
class MemoryPerDevice:
    """Bytes on one device, as XLA plans them.

    `aliased` outputs lie in donated arguments; `peak` is all that is allocated for a run,
    arguments + outputs - aliased + temp.
    """

    arguments: int
    outputs: int
    temp: int
    aliased: int
    peak: int


def collectives(compiled: "jax.stages.Compiled | str") -> list[Collective]:
    """Returns the collectives that a run of the program executes; start and done count once."""
    program, found, seen = _program(compiled), [], set()
    for site in _executed(program):
        opcode, attributes = site.instruction.opcode, site.instruction.attributes
        kind = opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = re.search(r"channel_id=(\d+)", attributes)
        if site.fused and channel:
            # A TPU spreads an all-gather over fusions (start, steps beside the compute, done),
            # each with a copy of the instruction on the same channel.
            if (site.scope, channel.group(1)) in seen:
                continue
            seen.add((site.scope, channel.group(1)))
        shape = site.instruction.shape
        if opcode != kind and (kind != "all-reduce" or shape.startswith("((")):
            shape = _group(shape, 0)[0][1]  # (operands, results, ...); all-reduce-start: results.
        arrays = _arrays(shape)
        size, dtypes = sum(a.bytes for a in arrays), tuple(dict.fromkeys(a.dtype for a in arrays))
        group_size = _group_size(attributes, program)
        bounds = site.count, site.at_least, site.at_most
        op_name = _op_name(site.instruction)
        found.append(Collective(kind, size, dtypes, *bounds, group_size, op_name))
    return found


def summarise(collectives: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Returns {kind: (executions, bytes of all executions)} of the kinds there are."""
    totals = {kind: (0, 0) for kind in KINDS}
    for one in collectives:
        count, size = totals[one.kind]
        totals[one.kind] = count + one.count, size + one.count * one.bytes
    return {kind: total for kind, total in totals.items() if total != (0, 0)}


def collectives_table(collectives: Iterable[Collective]) -> str:
    """Returns a line of text per kind; '>=', '<=' (both: '~') mark what is only a bound."""
    collectives = list(collectives)
    lines = [f"{'collective':<21}{'count':>10}{'bytes':>14}"]
    for kind, (count, size) in summarise(collectives).items():
        same = [one for one in collectives if one.kind == kind]
        at_least, at_most = any(c.at_least for c in same), any(c.at_most for c in same)
        mark = "~" if at_least and at_most else ">=" if at_least else "<=" if at_most else ""
        lines.append(f"{kind:<21}{f'{mark}{count:,}':>10}{mark + format_bytes(size):>14}")
    return "\n".join(lines) if len(lines) > 1 else "no collectives"


def format_bytes(size: int) -> str:
    """Returns '512 B', '1.5 KiB', '3.2 GiB'."""
    power = min(int(math.log2(max(size, 1)) // 10), 5)
    return f"{size / 1024**power:.1f} {'KMGTP'[power - 1]}iB" if power else f"{size} B"


def donated_bytes(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the bytes per device of the input arrays in whose buffers outputs lie."""
    return sum(array.bytes for array in _donated(compiled))


def num_donated(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the number of input arrays in whose buffers outputs lie."""
    return len(_donated(compiled))


def _donated(compiled: "jax.stages.Compiled | str") -> list["_Array"]:
    program = _program(compiled)
    entry = program.computations[program.entry].values()
    shapes = {int(i.operands[0]): i.shape for i in entry if i.opcode == "parameter"}
    # { {output index}: (parameter, {index in it}, may-alias), ... }
    pairs = _braced(program.header, "input_output_alias=")
    donated = []
    for parameter, index in re.findall(r": \((\d+), \{([\d, ]*)\}", pairs):
        shape = shapes[int(parameter)]
        for position in re.findall(r"\d+", index):
            shape = _group(shape, 0)[0][int(position)]
        donated += _arrays(shape)
    return donated


def memory_per_device(compiled: "jax.stages.Compiled") -> MemoryPerDevice | None:
    """Returns the memory that XLA plans, None where the backend does not tell."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = ("argument", "output", "temp", "alias")
    arguments, outputs, temp, aliased = (getattr(stats, f"{n}_size_in_bytes") for n in names)
    # Not XLA's peak_memory_in_bytes: on CPU it leaves out temp (jax 0.10 and 0.12).
    peak = arguments + outputs - aliased + temp
    return MemoryPerDevice(arguments, outputs, temp, aliased, peak)


def flops(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the matmul flops of a run on one device: 2 x multiplications in dots, convolutions.

    Branches count as taken, a loop of unknown trip count as one pass (see `unknown_loops`). Not
    counted: elementwise work, dots that XLA made a multiply and a sum, other custom calls.
    """
    return sum(site.count * _matmul_flops(site) for site in _executed(_program(compiled)))


def unknown_loops(compiled: "jax.stages.Compiled | str") -> list[str]:
    """Returns the op names of the loops whose trip count the program does not tell."""
    program = _program(compiled)
    loops = [site for site in _executed(program) if site.instruction.opcode == "while"]
    unknown = [s for s in loops if _trip_count(program, s.computation, s.instruction) is None]
    return [_op_name(site.instruction) or site.instruction.name for site in unknown]


def _matmul_flops(site: "_Site") -> int:
    opcode, attributes = site.instruction.opcode, site.instruction.attributes
    cublas = opcode == "custom-call" and 'target="__cublas$' in attributes
    if opcode not in ("dot", "convolution") and not cublas:
        return 0
    dims = [_arrays(site.computation[name].shape)[0].dims for name in site.instruction.operands]
    result = _arrays(site.instruction.shape)[0].dims  # cuBLAS's workspace is a second array.
    if opcode == "convolution":
        return _convolution_flops(dims[0], dims[1], result, attributes)
    key = r'"lhs_contracting_dimensions":\[(.*?)\]' if cublas else r"lhs_contracting_dims={(.*?)}"
    contracting = re.search(key, attributes)
    over = re.findall(r"\d+", contracting.group(1)) if contracting else []
    return 2 * math.prod(result) * math.prod(dims[0][int(dim)] for dim in over)


def _convolution_flops(
    lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int], attributes: str
) -> int:
    # A TPU's dots are convolutions too, their batch dims dilated windows: only where a window
    # meets an element, neither padding nor a hole, is there a multiplication.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None, f"convolution without dim_labels: {attributes}"
    lhs, rhs, result = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), (lhs, rhs, result), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([-\w]+)", _braced(attributes, "window=")))
    total = result["b"] * result["f"] * rhs["i"]
    for dim in sorted(lhs.keys() - {"b", "f"}):
        at = {key: values.split("x")[int(dim)] for key, values in window.items()}
        stride, hole, spread = (int(at.get(k, 1)) for k in ("stride", "lhs_dilate", "rhs_dilate"))
        pad = int(at.get("pad", "0_0").split("_")[0])
        total *= _window_hits(lhs[dim], rhs[dim], result[dim], stride, pad, hole, spread)
    return 2 * total


@lru_cache(maxsize=1024)
def _window_hits(
    size: int, window: int, outputs: int, stride: int, pad: int, hole: int, spread: int
) -> int:
    return sum(
        place % hole == 0
        for first in range(-pad, window * spread - pad, spread)
        for place in range(first, first + outputs * stride, stride)
        if 0 <= place <= (size - 1) * hole
    )


def _group_size(attributes: str, program: "_Program") -> int | None:
    found = re.search(r"replica_groups=(.*)", attributes)
    if found is None:
        return None
    if iota := re.match(r"\[\d+,(\d+)\]", found.group(1)):  # [4,2]<=[8]
        return int(iota.group(1))
    if mesh := re.match(r"mesh\[(.*?)\][^{]*\{(.*?)\}", found.group(1)):
        # jax 0.12: mesh['data'=4,'mdl'=2] {'mdl'}; 'data':(1)2 is a part of an axis, of size 2.
        sizes = dict(re.findall(r"'(.*?)'=(\d+)", mesh.group(1)))
        parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if listed := re.match(r"\{\{([\d,]*)\}", found.group(1)):  # {{0,1},{2,3}}
        return len(listed.group(1).split(","))
    everyone = re.findall(r"(?:num_partitions|replica_count)=(\d+)", program.header)
    return math.prod(int(size) for size in everyone)  # {}


class _Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # s4, bf16, f8e4m3fn; a token or opaque has none.
        size = 8 if self.dtype == "pred" else int(bits.group(0)) if bits else 0
        return -(-math.prod(self.dims) * size // 8)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names; the literal of a parameter or a constant
    attributes: str
    is_root: bool


_Computation = dict[str, _Instruction]


class _Program(NamedTuple):
    header: str
    computations: dict[str, _Computation]
    entry: str


def _program(compiled: "jax.stages.Compiled | str") -> _Program:
    return _parse(compiled if isinstance(compiled, str) else compiled.as_text())


@lru_cache(maxsize=4)
def _parse(text: str) -> _Program:
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    if header is None:
        raise ValueError(f"Not the text of an HLO module: {text[:80]!r}; pass compiled.as_text().")
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text[header.end() :].splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*\) -> .*)?\{$", line):
            current = computations.setdefault(opening.group(2), {})
            entry = opening.group(2) if opening.group(1) else entry
        elif current is not None and (head := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)):
            current[head.group(2)] = _instruction(head, re.sub(r"/\*index=\d+\*/", "", line))
    return _Program(header.group(0), computations, entry)


def _instruction(head: re.Match, line: str) -> _Instruction:
    start = head.end()
    end = _group(line, start)[1] if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    operands, close = _group(line, opening)
    # An operand is 'f32[7]{0} %name' or '%name'.
    names = tuple(operand.split(" ")[-1].lstrip("%") for operand in operands)
    opcode = line[end:opening].strip()
    return _Instruction(
        head.group(2), line[start:end], opcode, names, line[close:], bool(head.group(1))
    )


def _group(text: str, start: int) -> tuple[list[str], int]:
    # The parts, between commas, of the bracket at `start`, and the place after it.
    parts, depth, begin = [], 0, start + 1
    for mark in re.compile(r'[(){}\[\],]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += (mark.group(0) in "([{") - (mark.group(0) in ")]}")
        if depth == 0 or (depth == 1 and mark.group(0) == ","):
            parts.append(text[begin : mark.start()].strip())
            begin = mark.end()
        if depth == 0:
            return [part for part in parts if part], begin
    raise ValueError(f"Unbalanced brackets in HLO text: {text[start : start + 80]!r}")


def _braced(text: str, key: str) -> str:
    start = text.find(key + "{") + len(key)
    return text[start : _group(text, start)[1]] if start >= len(key) else ""


def _arrays(shape: str) -> list[_Array]:
    return [
        _Array(dtype, tuple(int(dim) for dim in re.findall(r"\d+", dims)))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    ]


def _op_name(instruction: _Instruction) -> str:
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return found.group(1) if found else ""


class _Site(NamedTuple):
    instruction: _Instruction
    computation: _Computation
    count: int
    at_least: bool
    at_most: bool
    scope: tuple[str, ...]  # the loops, branches and calls around it
    fused: bool


def _executed(program: _Program) -> Iterator[_Site]:
    return _walk(program, program.entry, 1, False, False, (), False)


def _walk(
    program: _Program,
    name: str,
    count: int,
    at_least: bool,
    at_most: bool,
    scope: tuple[str, ...],
    fused: bool,
) -> Iterator[_Site]:
    computation = program.computations[name]
    for one in computation.values():
        yield _Site(one, computation, count, at_least, at_most, scope, fused)
        inside = (*scope, one.name)
        if one.opcode == "while":
            trips = _trip_count(program, computation, one)
            unknown = at_least or trips is None
            # The condition is asked once more, to be told no.
            for key, extra in (("condition", 1), ("body", 0)):
                times = 1 if trips is None else trips + extra
                for callee in _callees(one, key):
                    figures = count * times, unknown, at_most, (*inside, key), fused
                    yield from _walk(program, callee, *figures)
        elif one.opcode == "conditional":
            for key in ("branch_computations", "true_computation", "false_computation"):
                for callee in _callees(one, key):
                    figures = count, at_least, True, (*inside, callee), fused
                    yield from _walk(program, callee, *figures)
        elif one.opcode == "fusion":
            for callee in _callees(one, "calls"):
                yield from _walk(program, callee, count, at_least, at_most, scope, True)
        elif one.opcode in ("call", "async-start", "custom-call"):
            # Not async-done, which names the same computation; nor the `to_apply` of reductions.
            for key in ("calls", "to_apply", "called_computations"):
                for callee in _callees(one, key):
                    yield from _walk(program, callee, count, at_least, at_most, inside, fused)


def _callees(instruction: _Instruction, key: str) -> list[str]:
    found = re.search(rf" {key}=(\{{[^}}]*\}}|[%\w.\-]+)", instruction.attributes)
    return re.findall(r"[\w.\-]+", found.group(1)) if found else []


# A scalar in a loop: (element of the loop's state or None, constant to add to it).
_Affine = tuple[int | None, int]
_STATE: _Affine = (-1, 0)  # the state itself, a tuple


def _trip_count(program: _Program, computation: _Computation, loop: _Instruction) -> int | None:
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known.group(1))
    # A TPU's text does not say. Read `for (i = initial; i < limit; i += step)` from the program.
    condition = program.computations[_callees(loop, "condition")[0]]
    body = program.computations[_callees(loop, "body")[0]]
    compared = _comparison(program, condition, lambda _: _STATE)
    state, stepped = computation.get(loop.operands[0]), _root(body)
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


def _root(computation: _Computation) -> _Instruction:
    return next(one for one in computation.values() if one.is_root)


def _comparison(
    program: _Program, computation: _Computation, argument: Callable[[int], _Affine | None]
) -> tuple[_Affine, _Affine, str] | None:
    root = _root(computation)

    def operand(index: int) -> _Affine | None:
        return _scalar(program, computation, root.operands[index], argument)

    if root.opcode in ("fusion", "call"):
        callee = program.computations[(_callees(root, "calls") or _callees(root, "to_apply"))[0]]
        return _comparison(program, callee, operand)
    direction = re.search(r"direction=(\w+)", root.attributes)
    left, right = (operand(0), operand(1)) if direction else (None, None)
    return (left, right, direction.group(1)) if left and right else None


def _scalar(
    program: _Program,
    computation: _Computation,
    name: str,
    argument: Callable[[int], _Affine | None],
) -> _Affine | None:
    one = computation[name]

    def operand(index: int) -> _Affine | None:
        return _scalar(program, computation, one.operands[index], argument)

    if one.opcode == "constant":
        return (None, int(one.operands[0])) if re.fullmatch(r"-?\d+", one.operands[0]) else None
    if one.opcode == "parameter":
        return argument(int(one.operands[0]))
    if one.opcode in ("copy", "bitcast", "reshape", "convert"):
        return operand(0)
    if one.opcode == "get-tuple-element":
        index = int(re.search(r"index=(\d+)", one.attributes).group(1))
        source = computation[one.operands[0]]
        if source.opcode == "tuple":
            return _scalar(program, computation, source.operands[index], argument)
        return (index, 0) if operand(0) == _STATE else None
    if one.opcode in ("add", "subtract"):
        left, right = operand(0), operand(1)
        if one.opcode == "subtract" and right is not None:
            right = (None, -right[1]) if right[0] is None else None
        if left is None or right is None or None not in (left[0], right[0]):
            return None
        return (left[0] if right[0] is None else right[0]), left[1] + right[1]
    if one.opcode in ("fusion", "call"):
        callee = program.computations[(_callees(one, "calls") or _callees(one, "to_apply"))[0]]
        return _scalar(program, callee, _root(callee).name, operand)
    return None
