"""Files that a reader sees whole: the old one, or the new one, whenever the process is killed."""

import os
from pathlib import Path

from praxis_lite.errors import not_written


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file beside `path`, on disk, and then gives it that name.

    A kill may leave `.NAME.new` behind, which the next call writes over. Raises ConfigError if it
    cannot be written; an old file stays as it is.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
