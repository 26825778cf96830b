"""Plain files: opened, hashed and written, whatever lies in their place."""

import os
import secrets
from pathlib import Path
from typing import IO

import xxhash

from praxis_lite.files.json_text import opened

__all__ = ["created", "digest_of", "opened", "partial_path", "partial_paths", "replace"]


def digest_of(file: IO[bytes]) -> str:
    """Returns XXH3, in hex, of the bytes from a file's position to its end."""
    hasher = xxhash.xxh3_128()
    while block := file.read(1 << 22):
        hasher.update(block)
    return hasher.hexdigest()


def partial_path(folder: str | os.PathLike[str]) -> str:
    """Returns a new path for a file that is being written; `partial_paths` finds those left."""
    return os.path.join(folder, f".{os.getpid()}.{secrets.token_hex(8)}.partial")


def partial_paths(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the files of a folder that were being written."""
    return list(Path(folder).glob(".*.partial"))


def created(path: str) -> IO[bytes]:
    """Creates a file to write. Raises OSError if anything, such as a link, lies there."""
    return open(path, "xb")


def replace(path: Path, data: bytes) -> None:
    """Writes a file, which is there whole or as it was before."""
    partial = partial_path(path.parent)
    with created(partial) as file:
        file.write(data)
    os.replace(partial, path)
