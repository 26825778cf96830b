"""Parses the HLO text of a compiled program into instructions."""

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax


class Array(NamedTuple):
    """The element type and dims of an array in a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Number of bits per element."""
        bits = re.search(r"\d+", self.dtype)  # s4, bf16, f8e4m3fn; a token has none.
        return 8 if self.dtype == "pred" else int(bits.group(0)) if bits else 0

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.dims) * self.bits // 8)


class Instruction(NamedTuple):
    """An instruction, which is one line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # Names; the literal of a parameter or a constant.
    attributes: str
    is_root: bool


Computation = dict[str, Instruction]


class Program(NamedTuple):
    """An HLO module.

    Attributes:
      header: The header line.
      computations: Computations, keyed by name.
      entry: Name of the entry computation.
      tables: Tables of file names, locations and stack frames.
    """

    header: str
    computations: dict[str, Computation]
    entry: str
    tables: dict[str, dict[int, str]]


def parse(compiled: "jax.stages.Compiled | str") -> Program:
    """Parses HLO text, or the HLO text of a `Compiled`.

    Raises:
      ValueError: The text is not HLO.
    """
    return _parse(compiled if isinstance(compiled, str) else text_of(compiled))


def text_of(compiled: "jax.stages.Compiled") -> str:
    """Returns the HLO text of a compiled program."""
    text = compiled.as_text()
    assert text is not None  # All JAX backends provide the text.
    return text


@lru_cache(maxsize=4)
def _parse(text: str) -> Program:
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    if header is None:
        raise ValueError(
            f"Expected the text of an HLO module, got {text[:80]!r}. Pass compiled.as_text()."
        )
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _lines(text[header.end() :]):
        # A line that begins a computation, or an instruction of the current computation.
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*\) -> .*)?\{$", line):
            current = computations.setdefault(opening.group(2), {})
            entry = opening.group(2) if opening.group(1) else entry
        elif current is not None and (head := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)):
            current[head.group(2)] = _instruction(head, re.sub(r"/\*index=\d+\*/", "", line))
    return Program(header.group(0), computations, entry, _tables(text))


def _lines(text: str) -> Iterator[str]:
    """Yields lines, after joining instructions that span several lines.

    The kernel_metadata of Pallas contains line breaks.
    """
    parts: list[str] = []
    for line in text.splitlines():
        depth = sum(part.count("{") - part.count("}") for part in parts)
        if parts and (line.startswith('"') or (depth > 0 and line.startswith("}"))):
            parts.append(line)
            continue
        if parts:
            yield "".join(parts)
        # Only instructions (indented lines) that end with an open brace can continue.
        parts = [line]
        if not (line.startswith("  ") and line.endswith("{")):
            yield line
            parts = []
    if parts:
        yield "".join(parts)


def _tables(text: str) -> dict[str, dict[int, str]]:
    tables = {}
    for name in ("FileNames", "FileLocations", "StackFrames"):
        table = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        rows = (row.split(" ", 1) for row in table.group(1).splitlines()) if table else ()
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
    """Returns the comma-separated parts in the bracket at `start`, and the index after it."""
    parts, depth, begin = [], 0, start + 1
    # A quoted string is a single mark, so that brackets and commas in it are ignored.
    for mark in re.compile(r'[(){}\[\],]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += (mark.group(0) in "([{") - (mark.group(0) in ")]}")
        if depth == 0 or (depth == 1 and mark.group(0) == ","):
            parts.append(text[begin : mark.start()].strip())
            begin = mark.end()
        if depth == 0:
            return [part for part in parts if part], begin
    raise ValueError(f"Unbalanced brackets in HLO text: {text[start : start + 80]!r}")


def braced(text: str, key: str) -> str:
    """Returns the text in braces after `key`, or an empty string."""
    start = text.find(key + "{") + len(key)
    return text[start : bracket(text, start)[1]] if start >= len(key) else ""


def arrays_of(shape: str) -> list[Array]:
    """Returns the arrays in a shape, which is an array or a tuple of arrays."""
    return [
        Array(dtype, tuple(int(dim) for dim in re.findall(r"\d+", dims)))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    ]


def op_name_of(instruction: Instruction) -> str:
    """Returns the name of an instruction's JAX operation, or an empty string."""
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return name.group(1) if name else ""


def callees(instruction: Instruction, key: str) -> list[str]:
    """Returns the names of the computations in an attribute of an instruction."""
    names = re.search(rf" {key}=(\{{[^}}]*\}}|[%\w.\-]+)", instruction.attributes)
    return re.findall(r"[\w.\-]+", names.group(1)) if names else []


def root_of(computation: Computation) -> Instruction:
    """Returns the root instruction of a computation, which computes its result."""
    return next(instruction for instruction in computation.values() if instruction.is_root)
