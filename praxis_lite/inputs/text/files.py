"""Documents out of a user's text files: where to cut them."""

import codecs
import os

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.sources.faults import none_skipped
from praxis_lite.inputs.sources.files.texts import decoded

BLOCK_BYTES = 16 * 1024


def read_documents(path: str) -> list[tuple[str, bytes]]:
    """Returns the blocks of a file as (`<basename>#<k>`, UTF-8); together they are the file.

    A byte order mark at its beginning is left out.

    Raises:
        ConfigError: the file cannot be read, is empty, or is not UTF-8; names file and line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(
            f"TextCorpus: the text file {path!r} cannot be read ({error.strerror}). Mend its "
            f"permissions, or leave it out of files."
        ) from error
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data:
        raise ConfigError(
            f"TextCorpus: the text file {path!r} is empty; text was wanted. Fill it, or leave it "
            f"out of files."
        )
    with none_skipped():
        decoded(data, f"TextCorpus: {path}", is_file=True)
    name = os.path.basename(path)
    return [(f"{name}#{k}", block) for k, block in enumerate(blocks(data, BLOCK_BYTES))]


def blocks(data: bytes, size: int) -> list[bytes]:
    """Returns UTF-8 cut into pieces of at most `size` bytes, at line ends where there are any.

    No character is cut.
    """
    pieces, start = [], 0
    while start < len(data):
        end = min(start + size, len(data))
        if end < len(data):
            line_end = data.rfind(b"\n", start, end)
            if line_end >= 0:
                end = line_end + 1
            else:
                # A byte of the form 10xxxxxx goes on with a character.
                end -= next((n for n in range(min(4, size)) if data[end - n] & 0xC0 != 0x80), 0)
        pieces.append(data[start:end])
        start = end
    return pieces
