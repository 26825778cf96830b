"""Copies that run beside the instructions: within a device's memory (HBM), and to its host's.

Those within wait for the memory's bandwidth, of which instructions take a part.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from praxis_lite.tools.explain.hlo_text import Instruction, arrays_of

# Copies between HBM and a TPU's fast memory (VMEM) that run beside the instructions.
STARTS, DONES = ("copy-start", "slice-start"), ("copy-done", "slice-done")
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?")


# Arrays of a layout with this memory space lie in the host's memory.
_ON_HOST = "S(5)"
TO_HOST, FROM_HOST = "copy to the host", "copy from the host"


class HostCopy(NamedTuple):
    """A copy over the link between a device and its host, and the bytes that move."""

    kind: str
    bytes: int


def host_copy(one: Instruction, around: Mapping[str, Instruction]) -> HostCopy | None:
    """Returns the copy to or from the host that an instruction makes or begins, or None.

    That is of an array whole, of a slice of an array there, or into such a slice, as of the layers
    of a stack.
    """
    kind = one.opcode.removesuffix("-start")
    if kind not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return None
    sources = [around[name].shape if name in around else "" for name in one.operands]
    # Of a start, (the result, the operand, ...), or ((the operands), the result, ...).
    arrays = _ARRAY.findall(one.shape)
    is_last = one.opcode.endswith("-start") and kind != "copy"
    result, source = arrays[-2 if is_last else 0], sources[0]
    if kind == "dynamic-update-slice":
        moved = source = sources[1]
    else:
        moved = result
    if (_ON_HOST in result) == (_ON_HOST in source):
        return None
    size = sum(array.bytes for array in arrays_of(moved))
    return HostCopy(TO_HOST if _ON_HOST in result else FROM_HOST, size)


def bytes_in_hbm(shape: str) -> int:
    """Returns the bytes of a shape's arrays that lie in HBM: those whose layout names no space."""
    return sum(
        sum(array.bytes for array in arrays_of(text))
        for text in _ARRAY.findall(shape) if not re.search(r"S\(\d+\)", text)
    )


class Traffic:
    """The traffic of a device's HBM, which never moves more bytes in a second than its bandwidth.

    Copies are served in the order in which they begin. An instruction goes first: what it moves
    by itself, while it runs, is taken from them.

    Args:
      bandwidth: bytes per second.
    """

    def __init__(self, bandwidth: float):
        self.bandwidth, self._begun, self._moved = bandwidth, 0.0, 0.0
        self._ends: dict[str, float] = {}

    def begin(self, copy: Instruction) -> None:
        """Takes a copy (of `STARTS`), whose bytes count for each of its ends that is in HBM."""
        ends = [text for text in _ARRAY.findall(copy.shape)][:2]
        moved = min(sum(array.bytes for array in arrays_of(text)) for text in ends)
        self._begun += moved * sum(bytes_in_hbm(text) > 0 for text in ends)
        self._ends[copy.name] = self._begun

    def passed(self, seconds: float, taken: int = 0) -> None:
        """Lets time pass, in which an instruction moves `taken` bytes of its own."""
        free = max(0.0, seconds * self.bandwidth - taken)
        self._moved = min(self._begun, self._moved + free)

    def wait(self, start: str) -> float:
        """Returns the seconds until the copy that began there has ended, and lets them pass."""
        left = max(0.0, self._ends.pop(start, 0.0) - self._moved)
        self._moved += left
        return left / self.bandwidth
