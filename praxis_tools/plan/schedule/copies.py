"""Models asynchronous copies between HBM and VMEM and between a device and its host.

Copies within a device compete with the running instructions for HBM bandwidth.
"""

import re
from typing import NamedTuple

from praxis_tools.explain.hlo_text import Computation, Instruction, arrays_of

# Asynchronous copies between HBM and a TPU's fast memory (VMEM).
HBM_COPY_STARTS, HBM_COPY_DONES = ("copy-start", "slice-start"), ("copy-done", "slice-done")
TO_HOST, FROM_HOST = "copy to the host", "copy from the host"
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?")
_HOST_MEMORY_SPACE = "S(5)"  # Appears in the layout of arrays in host memory.


class HostCopy(NamedTuple):
    """A copy between a device and its host (`kind` is TO_HOST or FROM_HOST)."""

    kind: str
    bytes: int


def host_copy(instruction: Instruction, computation: Computation) -> HostCopy | None:
    """Returns the host copy that an instruction performs or starts, or None for other instructions.

    A host copy transfers either an entire array or a slice of an array, such as one layer in a
    stack.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return None
    operands = [
        computation[name].shape if name in computation else "" for name in instruction.operands
    ]
    # copy-start returns (result, operand, context); other starts ((operands), result, context).
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
    """Returns the bytes of the arrays in HBM, whose layouts specify no memory space."""
    return sum(
        sum(array.bytes for array in arrays_of(text))
        for text in _ARRAY.findall(shape)
        if not re.search(r"S\(\d+\)", text)
    )


class HbmTraffic:
    """Divides the HBM bandwidth of a device between instructions and asynchronous copies.

    Instructions take precedence. Copies use the remaining bandwidth in the order in which they
    were started.

    Args:
      bandwidth: Bandwidth of the HBM, in bytes per second.
    """

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self._started_bytes, self._moved_bytes = 0.0, 0.0
        # Maps start instructions to the value of `_moved_bytes` at which the copy is done. Copies
        # complete in order.
        self._done_at_bytes: dict[str, float] = {}

    def start(self, copy: Instruction) -> None:
        """Starts a copy. A copy from HBM to HBM uses bandwidth for both the read and the write."""
        source_and_target = _ARRAY.findall(copy.shape)[:2]
        size = min(sum(array.bytes for array in arrays_of(text)) for text in source_and_target)
        self._started_bytes += size * sum(bytes_in_hbm(text) > 0 for text in source_and_target)
        self._done_at_bytes[copy.name] = self._started_bytes

    def advance(self, seconds: float, instruction_bytes: int = 0) -> None:
        """Advances the clock by `seconds`, in which an instruction moves `instruction_bytes`."""
        free_bytes = max(0.0, seconds * self.bandwidth - instruction_bytes)
        self._moved_bytes = min(self._started_bytes, self._moved_bytes + free_bytes)

    def wait_for(self, start: str) -> float:
        """Advances the clock until a copy completes, and returns the waiting time in seconds.

        Args:
          start: Name of the instruction that started the copy.
        """
        remaining_bytes = max(0.0, self._done_at_bytes.pop(start, 0.0) - self._moved_bytes)
        self._moved_bytes += remaining_bytes
        return remaining_bytes / self.bandwidth
