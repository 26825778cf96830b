"""Copies rows from files into a cached Arrow file with Hugging Face's `datasets`."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from praxis_lite.core.errors import ConfigError, format_bytes, shortened
from praxis_lite.host.atomic_files import not_written
from praxis_lite.inputs.processes.all_cores import require_guarded_main
from praxis_lite.inputs.sources.base import file_digest, unreadable_file
from praxis_lite.inputs.sources.copied import ROWS_PER_BATCH, CopiedFiles

_MIN_LOGGED_BYTES = 64 << 20  # Smaller files are copied without a log line or a progress bar.


def write_copy(source: CopiedFiles, key: str) -> Path:
    """Copies a source's rows into an Arrow file, without network access.

    If another process is already copying the same rows, waits for that process instead.

    Args:
      source: Source to copy.
      key: Name of the copy's folder, which identifies its contents.

    Returns:
      The folder of the copy.

    Raises:
      ConfigError: A file cannot be read, the folder cannot be written, or `source.tables` failed.
    """
    require_guarded_main()
    folder = source.cache_folder()
    size = sum(state.size for state in source.states)
    try:
        builder = _Copy(
            source,
            cache_dir=folder,
            dataset_name=source.name_of_copy,
            hash=key,
            writer_batch_size=ROWS_PER_BATCH,
        )
        is_large = size > _MIN_LOGGED_BYTES
        if is_large:
            _log.info(
                "copying %s in %d files into %s for random access",
                format_bytes(size),
                len(source.paths),
                builder.cache_dir,
            )
        with _progress_bar(is_large):
            builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            raise not_written(folder, cause) from None
        if isinstance(cause, pyarrow.ArrowException) or type(cause) is ValueError:
            raise ConfigError(
                f"{source.location} cannot be copied into an Arrow file: "
                f"{shortened(str(cause), 300)}. Exclude the column with `columns`, or convert it "
                "to a different type."
            ) from cause
        raise cause from None
    except OSError as error:
        raise ConfigError(
            f"The copy of {source.location} in {folder} cannot be written "
            f"({error.strerror or error}). Set the source's cache_dir to a writable folder."
        ) from None
    return Path(builder.cache_dir)


class _Copy(datasets.ArrowBasedBuilder):
    """Builds a dataset with a single split: the rows from all files, in order."""

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
                digests.append(file_digest(path))
            except OSError as error:
                raise unreadable_file(path, error) from None
            source.require_unchanged(file)
            counts.append(count)
        # `datasets` writes this into dataset_info.json, from which `CopiedFiles.copy` reads it.
        self.info.description = json.dumps({"counts": counts, "digests": digests})


def _with_schema(
    table: pyarrow.Table, path: str, first: str, schema: pyarrow.Schema
) -> pyarrow.Table:
    """Reorders and casts the columns of a table to the schema of the first file."""
    if table.schema.equals(schema):
        return table
    try:
        if set(table.column_names) == set(schema.names):
            return table.select(schema.names).cast(schema)
    except pyarrow.ArrowInvalid:
        pass
    columns, expected = (
        ", ".join(f"{field.name}: {field.type}" for field in fields)
        for fields in (table.schema, schema)
    )
    raise ConfigError(
        f"{path} has the columns {shortened(columns, 300)}; expected the columns of {first}: "
        f"{shortened(expected, 300)}. Write all files with the same columns, or select common "
        "columns with `columns`."
    )


@contextlib.contextmanager
def _progress_bar(is_visible: bool) -> Iterator[None]:
    """Hides the `datasets` progress bar unless `is_visible`."""
    was_visible = not datasets.are_progress_bars_disabled()
    if was_visible and not is_visible:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_visible:
            datasets.enable_progress_bars()


_log = logging.getLogger(__name__)
