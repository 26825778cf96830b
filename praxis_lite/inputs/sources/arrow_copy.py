"""Copies the rows of files into an Arrow file, with Hugging Face's `datasets` and its cache."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from praxis_lite.core.errors import ConfigError, format_bytes, shown
from praxis_lite.host.whole_files import not_written
from praxis_lite.inputs.processes.all_cores import require_guarded_main
from praxis_lite.inputs.sources.base import digest_of_file, unreadable
from praxis_lite.inputs.sources.copied import ROWS_PER_BATCH, CopiedFiles

_WORTH_A_LINE = 64 << 20  # Bytes of files.


def write_copy(source: CopiedFiles, key: str) -> Path:
    """Copies a source's rows, and returns the folder of the copy. Nothing is read from the network.

    Another process that copies the same rows is waited for.

    Args:
      key: of the copy, for the folder's name.

    Raises:
      ConfigError: a file or the folder cannot be read or written; and what `source.tables` raises.
    """
    require_guarded_main()
    folder = source.cache_folder()
    size = sum(state.size for state in source.states)
    try:
        builder = _Copy(
            source, cache_dir=folder, dataset_name=source.name_of_copy, hash=key,
            writer_batch_size=ROWS_PER_BATCH,
        )
        is_large = size > _WORTH_A_LINE
        if is_large:
            _log.info(
                "copying %s in %d files into %s, where any row is found by its number",
                format_bytes(size), len(source.paths), builder.cache_dir,
            )
        with _progress_bar(is_large):
            builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            raise not_written(folder, cause) from None
        if isinstance(cause, pyarrow.ArrowException) or type(cause) is ValueError:
            raise ConfigError(
                f"{source.location} cannot be copied into an Arrow file: {shown(str(cause), 300)}. "
                "Leave the column out (columns), or write it as another type."
            ) from cause
        raise cause from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}); a copy of {source.location} "
            "is stored there. Set the source's cache_dir to a folder that can be written."
        ) from None
    return Path(builder.cache_dir)


class _Copy(datasets.ArrowBasedBuilder):
    """Builds a dataset of one split with the rows of all files in order."""

    def __init__(self, source: CopiedFiles, **settings: Any):
        self._source = source
        super().__init__(**settings)

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(
        self, dl_manager: datasets.DownloadManager
    ) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator("train")]

    def _generate_tables(self) -> Iterator[tuple[int, pyarrow.Table]]:
        source, first, counts, digests = self._source, None, [], []
        for file, path in enumerate(source.paths):
            count = 0
            try:
                for table in source.tables(path):
                    first = first or (path, table.schema)
                    count += len(table)
                    yield file, _with_schema(table, path, *first)
                digests.append(digest_of_file(path))
            except OSError as error:
                raise unreadable(path, error) from None
            source.require_unchanged(file)
            counts.append(count)
        # `datasets` writes it next to the rows.
        self.info.description = json.dumps({"counts": counts, "digests": digests})


def _with_schema(
    table: pyarrow.Table, path: str, first: str, schema: pyarrow.Schema
) -> pyarrow.Table:
    """Returns a table with the columns and types of the first file."""
    if table.schema.equals(schema):
        return table
    try:
        if set(table.column_names) == set(schema.names):
            return table.select(schema.names).cast(schema)
    except pyarrow.ArrowInvalid:
        pass
    columns, expected = (
        ", ".join(f"{field.name}: {field.type}" for field in one) for one in (table.schema, schema)
    )
    raise ConfigError(
        f"{path} has the columns {shown(columns, 300)}; {first} has {shown(expected, 300)}. Write "
        "all files with the same columns, or name those that are read (columns)."
    )


@contextlib.contextmanager
def _progress_bar(is_shown: bool) -> Iterator[None]:
    """Shows `datasets`' progress bar only for large work."""
    was_shown = not datasets.are_progress_bars_disabled()
    if was_shown and not is_shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_shown:
            datasets.enable_progress_bars()


_log = logging.getLogger(__name__)
