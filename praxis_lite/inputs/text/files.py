"""Documents out of a user's text files: which files a glob names, and where to cut them."""

import glob
import os

from praxis_lite.errors import ConfigError

BLOCK_BYTES = 16 * 1024


def matching_files(patterns: str, what: str = "TextCorpus") -> list[str]:
    """Returns the files that comma-separated globs (`**`, `~`) name, sorted, each once.

    Args:
        what: asks for them, for messages.

    Raises:
        ConfigError: a pattern names no file.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not wanted:
        raise ConfigError(
            f"{what}: files is {patterns!r}, which names no file. Give a path or a glob."
        )
    return sorted({path for pattern in wanted for path in _files_of(pattern, what)})


def _files_of(pattern: str, what: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    if os.path.isfile(expanded):  # A literal path may hold the characters of a glob.
        return [expanded]
    found = glob.glob(expanded, recursive=True)
    files = [path for path in found if os.path.isfile(path)]
    if files:
        return files
    if found:
        matched = f"only {'a directory' if len(found) == 1 else 'directories'}"
        change = f"Name the files in it, for instance {os.path.join(pattern, '**', '*.txt')!r}."
    else:
        matched, change = "nothing", "Correct the path or the glob."
    raise ConfigError(
        f"{what}: files names {pattern!r}, which matches {matched} (seen from {os.getcwd()}); "
        f"a file was wanted. {change}"
    )


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
