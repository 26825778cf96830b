"""Reads the largest temporary buffers of a step from XLA's buffer assignment.

`train_step.hlo_proto.pb` is an HloProto (xla/service/hlo.proto). This module decodes the few fields
it needs from the wire format, because no small package contains XLA's protocol buffers.
"""

from collections.abc import Iterator
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import content_of


def largest_temporaries(file: Path) -> list[tuple[str, int]]:
    """Returns the largest temporary buffers that store results of instructions.

    If several buffers use the same memory at different times, only the largest is returned.
    Therefore, the sum of the sizes is at most the size of the step's temporaries.

    Returns:
      A list of (instruction name, bytes), largest first; empty if there is no buffer assignment.

    Raises:
      ConfigError: The file is missing or damaged.
    """
    try:
        return _largest(content_of(file))
    except (IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} is damaged, or was not written by praxis_lite ({error}). Record another "
            "profile."
        ) from None


def _largest(content: bytes) -> list[tuple[str, int]]:
    """Returns the (instruction name, bytes) of the largest buffers in an encoded HloProto.

    The numbers are field numbers in hlo.proto.
    """
    module, assignment = _submessages(content, 1), _submessages(content, 3)
    if not assignment:
        return []
    # Maps instruction ids to instruction names.
    names = {
        _number(instruction, 35): _submessages(instruction, 1)[0].decode()
        for computation in _submessages(module[0], 3)
        for instruction in _submessages(computation, 2)
    }
    # Maps buffer ids to the ids of the instructions that define the buffers.
    defined = {
        _number(buffer, 1): _number(_submessages(buffer, 3)[0], 4)
        for buffer in _submessages(assignment[0], 1)
    }
    largest: list[tuple[str, int]] = []
    for allocation in _submessages(assignment[0], 3):
        # Skip arguments, outputs and constants. The fields are is_thread_local,
        # is_entry_computation_parameter, maybe_live_out and is_constant.
        if any(_number(allocation, field) for field in (3, 5, 7, 12)):
            continue
        assigned = [
            (_number(part, 3), _number(part, 2), _number(part, 1))
            for part in _submessages(allocation, 9)
        ]
        # From large to small, keep each buffer that does not overlap with a larger one.
        taken: list[tuple[int, int]] = []
        for size, offset, buffer in sorted(assigned, key=lambda part: (-part[0], *part[1:])):
            if size and all(offset + size <= first or last <= offset for first, last in taken):
                taken.append((offset, offset + size))
                largest.append((names[defined[buffer]], size))
    return sorted(largest, key=lambda buffer: -buffer[1])


def _submessages(message: bytes, field: int) -> list[bytes]:
    """Returns the values of a repeated field that contains messages or strings."""
    return [
        value for number, value in _fields(message) if number == field and isinstance(value, bytes)
    ]


def _number(message: bytes, field: int) -> int:
    """Returns the value of a numeric field, or 0 if the field is absent."""
    return next(
        (value for number, value in _fields(message) if number == field and type(value) is int), 0
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (field number, value) for each field of an encoded message."""
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        value: int | bytes
        wire_type = tag & 7
        if wire_type == 0:
            value, offset = _varint(message, offset)
        elif wire_type == 2:
            size, offset = _varint(message, offset)
            value, offset = message[offset : offset + size], offset + size
        else:  # 64 or 32 bits.
            size = {1: 8, 5: 4}[wire_type]
            value, offset = int.from_bytes(message[offset : offset + size], "little"), offset + size
        if offset > len(message):
            raise ValueError("a field is truncated")
        yield tag >> 3, value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value, shift, offset = value | (byte & 0x7F) << shift, shift + 7, offset + 1
        if byte < 0x80:
            return value, offset
