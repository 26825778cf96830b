"""Names of the files in a step's folder: regular files, under the names that are written."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.checkpoints.steps.step_files import entries

ITEMS = ("mdl_vars", "opt_states")
_DATABASE = r"(manifest\.ocdbt|d/[0-9a-f]{32})"
_NAME = re.compile(
    r"(manifest\.json|commit\.json|_CHECKPOINT_METADATA|commit_success\.txt|(mdl_vars|opt_states)/"
    rf"(_METADATA|_sharding|commit_success\.txt|array_metadatas/process_\d{{1,9}}|{_DATABASE}"
    rf"|ocdbt\.process_\d{{1,9}}/{_DATABASE}))"
)
# What tells other layouts, by a file's own name.
_FOREIGN = {
    ".zarray": "plain Zarr files", ".zgroup": "plain Zarr files", "zarr.json": "Zarr 3 files",
    "checkpoint": "Flax's or T5X's msgpack", "_METADATA.json": "another Orbax",
    "metadata": "Pax, or an earlier praxis_lite",
}


def check_names(step_dir: Path) -> None:
    """Checks that a step's folder has what praxis_lite and Orbax write, and nothing else.

    Raises:
      ConfigError: there is a symlink or another special file, at any depth; or a name that neither
        writes: those of other layouts are told.
    """
    for name in regular_files(step_dir):
        if not _NAME.fullmatch(name):
            base, suffix = os.path.basename(name), os.path.splitext(name)[1]
            layout = _FOREIGN.get(base) or {".npz": "NumPy", ".npy": "NumPy"}.get(suffix)
            of = f", of another layout ({layout})" if layout else ""
            raise ConfigError(f"there is a file {name!r} that praxis_lite does not write{of}")


def regular_files(directory: Path) -> Iterator[str]:
    """Yields the names of the files at any depth, with their folders.

    Raises:
      ConfigError: there is a symlink or another special file.
    """
    if directory.is_symlink():
        raise ConfigError("it is a symbolic link")
    for name, entry in entries(directory):
        if entry.is_symlink():
            raise ConfigError(f"{name!r} is a symbolic link")
        if not entry.is_file(follow_symlinks=False):
            raise ConfigError(f"{name!r} is no regular file")
        yield name
