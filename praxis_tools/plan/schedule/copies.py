"""Copies that run concurrently with instructions: within a device (HBM, VMEM), and to its host.

Copies within a device share the bandwidth of HBM with the instructions.
"""

import re
from typing import NamedTuple

from praxis_tools.explain.hlo_text import Computation, Instruction, arrays_of

# Asynchronous copies between HBM and a TPU's fast memory (VMEM).
HBM_COPY_STARTS, HBM_COPY_DONES = ("copy-start", "slice-start"), ("copy-done", "slice-done")
TO_HOST, FROM_HOST = "copy to the host", "copy from the host"
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?")
_HOST_MEMORY_SPACE = "S(5)"  # In the layout of an array that is in host memory.


class HostCopy(NamedTuple):
    """A copy over the link between a device and its host; `kind` is TO_HOST or FROM_HOST."""

    kind: str
    bytes: int


def host_copy(instruction: Instruction, computation: Computation) -> HostCopy | None:
    """Returns the copy to or from the host that an instruction makes or starts, or None.

    It copies a complete array, or a slice from or into an array, such as one layer of a stack.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return None
    operands = [
        computation[name].shape if name in computation else "" for name in instruction.operands
    ]
    # copy-start returns (result, operand, context), others ((operands), result, context).
    arrays = _ARRAY.findall(instruction.shape)
    result_is_last = instruction.opcode.endswith("-start") and opcode != "copy"
    result = arrays[-2 if result_is_last else 0]
    if opcode == "dynamic-update-slice":
        moved = source = operands[1]
    else:
        moved, source = result, operands[0]
    if (_HOST_MEMORY_SPACE in result) == (_HOST_MEMORY_SPACE in source):
        return None
    size = sum(array.bytes for array in arrays_of(moved))
    return HostCopy(TO_HOST if _HOST_MEMORY_SPACE in result else FROM_HOST, size)


def bytes_in_hbm(shape: str) -> int:
    """Returns the bytes of a shape's arrays that are in HBM: layouts without a memory space."""
    return sum(
        sum(array.bytes for array in arrays_of(text))
        for text in _ARRAY.findall(shape) if not re.search(r"S\(\d+\)", text)
    )


class HbmTraffic:
    """Shares the bandwidth of a device's HBM between instructions and asynchronous copies.

    Instructions take precedence. Copies get the bandwidth that a running instruction leaves, in
    the order in which they start.

    Args:
      bandwidth: bytes per second.
    """

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self._started_bytes, self._moved_bytes = 0.0, 0.0
        # By start instruction: the value of `_moved_bytes` at which its copy is complete.
        self._ends: dict[str, float] = {}

    def start(self, copy: Instruction) -> None:
        """Starts a copy. Its bytes count once for each of its ends that is in HBM."""
        ends = _ARRAY.findall(copy.shape)[:2]
        size = min(sum(array.bytes for array in arrays_of(text)) for text in ends)
        self._started_bytes += size * sum(bytes_in_hbm(text) > 0 for text in ends)
        self._ends[copy.name] = self._started_bytes

    def advance(self, seconds: float, instruction_bytes: int = 0) -> None:
        """Lets time pass in which an instruction moves bytes of its own."""
        free = max(0.0, seconds * self.bandwidth - instruction_bytes)
        self._moved_bytes = min(self._started_bytes, self._moved_bytes + free)

    def wait_for(self, start: str) -> float:
        """Returns the seconds until the copy of a start instruction ends, and lets them pass."""
        left = max(0.0, self._ends.pop(start, 0.0) - self._moved_bytes)
        self._moved_bytes += left
        return left / self.bandwidth
