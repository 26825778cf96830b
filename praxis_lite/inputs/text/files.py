"""Documents out of a user's text files: where to cut them."""

import os

from praxis_lite.errors import ConfigError

BLOCK_BYTES = 16 * 1024


def read_documents(path: str) -> list[tuple[str, bytes]]:
    """Returns the blocks of a file as (`<basename>#<k>`, bytes); together they are the file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(
            f"TextCorpus: the text file {path!r} cannot be read ({error.strerror}). Mend its "
            f"permissions, or leave it out of files."
        ) from error
    if not data:
        raise ConfigError(
            f"TextCorpus: the text file {path!r} is empty; text was wanted. Fill it, or leave it "
            f"out of files."
        )
    name = os.path.basename(path)
    return [(f"{name}#{k}", block) for k, block in enumerate(blocks(data, BLOCK_BYTES))]


def blocks(data: bytes, size: int) -> list[bytes]:
    """Returns `data` cut into pieces of at most `size` bytes, at line ends where there are any."""
    pieces, start = [], 0
    while start < len(data):
        end = min(start + size, len(data))
        if end < len(data):
            line_end = data.rfind(b"\n", start, end)
            end = line_end + 1 if line_end >= 0 else end
        pieces.append(data[start:end])
        start = end
    return pieces
