"""The largest buffers among a step's temporaries, from XLA's assignment of buffers to memory.

`train_step.hlo_proto.pb` is an HloProto (xla/service/hlo.proto), of which a few fields are read
here, so that no package with XLA's protocol buffers is needed.
"""

from collections.abc import Iterator
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.json_text import content_of


def largest_temporaries(file: Path) -> list[tuple[str, int]]:
    """Returns instructions and the bytes of the buffers that hold their results, largest first.

    A buffer is left out if a larger one has its place in memory at another time: so the bytes add
    up to no more than the temporaries of a step.

    Returns:
      Names and bytes; [] where the compiler has told no assignment.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    try:
        return _largest(content_of(file))
    except (IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} is damaged, or praxis_lite did not write it ({error}). Make another profile."
        ) from None


def _largest(content: bytes) -> list[tuple[str, int]]:
    module, assignment = _parts(content, 1), _parts(content, 3)
    if not assignment:
        return []
    names = {
        _number(instruction, 35): _parts(instruction, 1)[0].decode()
        for computation in _parts(module[0], 3) for instruction in _parts(computation, 2)
    }
    defined = {
        _number(buffer, 1): _number(_parts(buffer, 3)[0], 4)
        for buffer in _parts(assignment[0], 1)
    }
    result: list[tuple[str, int]] = []
    for allocation in _parts(assignment[0], 3):
        # Thread-local, a parameter, live out of the step, a constant.
        if any(_number(allocation, field) for field in (3, 5, 7, 12)):
            continue
        assigned = [
            (_number(part, 3), _number(part, 2), _number(part, 1))
            for part in _parts(allocation, 9)
        ]
        taken: list[tuple[int, int]] = []
        for size, offset, buffer in sorted(assigned, key=lambda item: (-item[0], *item[1:])):
            if size and all(offset + size <= first or last <= offset for first, last in taken):
                taken.append((offset, offset + size))
                result.append((names[defined[buffer]], size))
    return sorted(result, key=lambda item: -item[1])


def _parts(message: bytes, field: int) -> list[bytes]:
    """Returns the values of a field whose values have a length: messages, texts."""
    return [value for number, value in _fields(message) if number == field
            and isinstance(value, bytes)]


def _number(message: bytes, field: int) -> int:
    """Returns the value of a field that is a number; 0 where it is absent."""
    return next(
        (value for number, value in _fields(message) if number == field and type(value) is int), 0
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field of a message in the wire format."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(message, place)
        elif kind == 2:
            size, place = _varint(message, place)
            value, place = message[place : place + size], place + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, place = int.from_bytes(message[place : place + size], "little"), place + size
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        if place > len(message):
            raise ValueError("a field that is cut off")
        yield tag >> 3, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place
