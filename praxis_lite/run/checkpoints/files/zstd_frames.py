"""Zstandard frames: the sizes in their headers, and short frames decoded within a limit.

No Zstandard decoder comes with Python before 3.14. TensorStore has one, behind its zarr driver.
The format: RFC 8878.
"""

import re

import tensorstore as ts

from praxis_lite.core.errors import ConfigError

MAX_HEADER_BYTES = 18
# An RLE block: 128 KiB of one byte from 4 bytes; no other kind gives more.
MAX_RATIO = 2**17 // 4
_MAX_BLOCK_BYTES = 2**17
# A decoder allocates the window, whatever the content. The levels up to 19 take 8 MiB at most.
_MAX_WINDOW_BYTES = 2**23


def content_bytes(data: bytes) -> int | None:
    """Returns how long the content is, or None if the header that `data` begins with does not say.

    Raises:
      ConfigError: the header is damaged, or asks for a dictionary or a window beyond 8 MiB.
    """
    return _header(data)[0]


def decoded(data: bytes, most: int) -> bytes:
    """Returns the content of a frame; what would be longer than `most` is not decoded.

    Raises:
      ConfigError: the frame is damaged, or its content is or might be longer.
    """
    size = content_bytes(data)
    bound = _most_content_bytes(data)
    if size is None:
        size = bound
    if min(size, bound) > most or size > bound:
        raise ConfigError(f"a Zstandard frame of {len(data)} bytes holds more than {most} bytes")
    try:
        return _decoded(data, size)
    except ValueError as error:
        # The header did not say the size, and the bound was too large.
        result = re.search(r"at uncompressed byte (\d+)$", str(error))
        if result is None or int(result[1]) >= size:
            raise ConfigError(f"a Zstandard frame of {len(data)} bytes is damaged") from None
    try:
        return _decoded(data, int(result[1]))
    except ValueError:
        raise ConfigError(f"a Zstandard frame of {len(data)} bytes is damaged") from None


def _header(data: bytes) -> tuple[int | None, int]:
    """Returns the size of the content, or None if it is not said, and where the blocks begin."""
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 6:
        raise ConfigError("what should be a Zstandard frame is not one")
    descriptor = data[4]
    single_segment = bool(descriptor & 0x20)
    if descriptor & 0x08 or descriptor & 0x03:
        raise ConfigError("a Zstandard frame wants a dictionary, or is of another format")
    start = 5
    if not single_segment:
        exponent, mantissa = data[5] >> 3, data[5] & 7
        window = (1 << (10 + exponent)) * (8 + mantissa) // 8
        if window > _MAX_WINDOW_BYTES:
            raise ConfigError(f"a Zstandard frame wants a window of {window} bytes")
        start = 6
    num_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    if len(data) < start + num_bytes:
        raise ConfigError("a Zstandard frame ends in its header")
    if not num_bytes:
        return None, start
    size = int.from_bytes(data[start : start + num_bytes], "little")
    return size + 256 * (num_bytes == 2), start + num_bytes


def _most_content_bytes(data: bytes) -> int:
    """Returns how long the content is at most, by the headers of the blocks."""
    at, total, last = _header(data)[1], 0, False
    while not last:
        if len(data) < at + 3:
            raise ConfigError("a Zstandard frame ends before its last block")
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if kind == 3 or size > _MAX_BLOCK_BYTES:
            raise ConfigError("a Zstandard frame has a block that cannot be")
        total += _MAX_BLOCK_BYTES if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
    if at + 4 * bool(data[4] & 4) != len(data):  # A checksum of the content may follow.
        raise ConfigError("a Zstandard frame is not as long as its blocks")
    return total


def _decoded(data: bytes, size: int) -> bytes:
    """Returns the content; raises ValueError if it has another size."""
    if size == 0:
        return b""
    metadata = {
        "zarr_format": 2, "shape": [size], "chunks": [size], "dtype": "|u1", "order": "C",
        "compressor": {"id": "zstd"}, "filters": None, "fill_value": None,
    }
    # A memory store of its own, and no cache.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": metadata}
    array = ts.open(spec, create=True, context=context).result()
    array.kvstore["0"] = data
    return array.read().result().tobytes()
