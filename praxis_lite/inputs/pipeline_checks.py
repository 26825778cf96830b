"""Validates pipelines and their batches, and finds rows with NaN or infinity."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.batch_arrays import narrow_dtype
from praxis_lite.inputs.sources.base import Source
from praxis_lite.inputs.sources.faults import BadExample

__all__ = ("checked_spec",)


def checked_batches(
    pipeline: InputPipeline, name: str, start: int = 0, rows: slice | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields (index, batch) for all batches from `start` on, after checking each batch.

    Args:
      pipeline: Pipeline that computes the batches.
      name: Path of the dataset for error messages, such as "datasets.train".
      start: Index of the first batch.
      rows: Rows of the global batch to yield; None for all.

    Raises:
      ConfigError: The names, shapes or dtypes of a batch are not in `element_specs`.
    """
    num_rows = None if rows is None else rows.stop - rows.start
    expected = [_expected_leaves(checked_spec(pipeline, name), num_rows)]
    for spec in pipeline.element_specs()[1:]:
        multiple = num_rows_of(spec) // pipeline.batch_size
        expected.append(_expected_leaves(spec, None if num_rows is None else multiple * num_rows))
    batches = pipeline.batches(start=start, rows=rows)
    if not isinstance(batches, Iterable):
        raise ConfigError(
            f"{name}: {pipeline.class_name()}.batches returns {_found(batches)}; expected an "
            "iterator of batches. Is a `return` or a `yield` missing?"
        )
    for index, batch in enumerate(batches, start=start):
        actual = {path: _found(leaf) for path, leaf in _leaves(batch).items()}
        if actual not in expected:
            subject = f"{name}: batch {index} (counted from 0)"
            raise ConfigError(_mismatch_message(subject, actual, expected[0]))
        yield index, batch


def check_data(pipeline: InputPipeline, name: str) -> None:
    """Runs `pipeline.check`, and adds the `--set` path of `skip` to errors about an example.

    Args:
      pipeline: Pipeline to check.
      name: Path of the dataset in the config, such as "datasets.train".

    Raises:
      ConfigError: `check` failed.
    """
    try:
        pipeline.check()
    except BadExample as error:
        sources = dict(_sources(pipeline, name))
        paths = [path for path, source in sources.items() if source.contains_location(error.where)]
        paths = paths or list(sources)
        if len(paths) != 1:  # Ambiguous: the message could not specify which `skip` to set.
            raise
        raise error.with_skip_path(f"{paths[0]}.skip") from None


def _sources(node: Any, path: str) -> Iterator[tuple[str, Source]]:
    """Yields (config path, source) for every source in a pipeline."""
    if isinstance(node, Source):
        yield path, node
    elif isinstance(node, Mapping):
        for name, child in node.items():
            yield from _sources(child, f"{path}.{name}")
    elif dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
        for name in names:
            yield from _sources(getattr(node, name, None), f"{path}.{name}")
        documents = getattr(node, "documents", None)
        if "skip" in names and "documents" not in names and documents is not None:
            yield path, documents.source  # The pipeline built this source from its own settings.


def check_members(pipeline: InputPipeline, name: str) -> None:
    """Checks that a user-defined pipeline implements the `InputPipeline` interface.

    Args:
      pipeline: Pipeline to check.
      name: Path of the dataset for error messages, such as "datasets.train".

    Raises:
      ConfigError: `batch_size` is missing, or `batches` has an incompatible signature.
    """
    owner = f"{name}: {pipeline.class_name()}"
    if not hasattr(pipeline, "batch_size"):
        raise ConfigError(
            f"{owner} has no batch_size, the number of rows in a batch. Set it in __init__."
        )
    try:
        inspect.signature(pipeline.batches).bind(start=0, rows=None)
    except TypeError as error:
        raise ConfigError(
            f"{owner}.batches cannot be called with start and rows: {error}. Write def "
            "batches(self, start=0, *, rows=None)."
        ) from None


def checked_spec(pipeline: InputPipeline, name: str) -> Any:
    """Validates the pipeline's `element_spec` and returns it.

    Args:
      pipeline: Pipeline to check.
      name: Path of the dataset for error messages, such as "datasets.train".

    Raises:
      ConfigError: `element_spec` is not a dict of shapes and dtypes, or `num_batches` is neither
        an integer nor None.
    """
    owner, num_batches = f"{name}: {pipeline.class_name()}", pipeline.num_batches
    require(
        num_batches is None or isinstance(num_batches, int | np.integer),
        f"{owner}.num_batches",
        num_batches,
        "a property that is the number of batches in one pass, or None if the pipeline is endless",
    )
    spec = pipeline.element_spec()
    leaves = _leaves(spec).values()
    require(
        isinstance(spec, Mapping)
        and len(leaves) > 0
        and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves),
        f"{owner}.element_spec()",
        spec,
        "a dict with a jax.ShapeDtypeStruct for each leaf",
        "For example, return praxis_lite.inputs.base.spec_of(x=((32, 5), np.float32)).",
    )
    return spec


def non_finite_rows(
    batch: Any, first_row: int = 0, example_of: Callable[[int], str] = lambda row: ""
) -> str | None:
    """Returns a message that lists the leaves and rows with NaN or infinity, or None.

    Args:
      batch: Rows of a global batch, as host arrays.
      first_row: Index of the first of these rows in the global batch.
      example_of: Returns the location of the example in a row of the global batch, or "" if
        unknown.
    """
    messages = []
    for path, leaf in _leaves(batch).items():
        x = np.asarray(leaf)
        # Use JAX's issubdtype: NumPy does not treat bfloat16 as a float.
        if not jax.numpy.issubdtype(x.dtype, np.inexact):
            continue
        bad = ~np.isfinite(x.astype(np.float32) if x.dtype.itemsize < 4 else x)
        if not bad.any():
            continue
        kind = "NaN" if np.isnan(x).any() else "infinity"
        if not x.ndim:
            messages.append(f"{kind} in '{path}'")
            continue
        rows = np.flatnonzero(bad.reshape(len(x), -1).any(axis=1)) + first_row
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        rows_text = ", ".join(
            f"{row} ({example})" if (example := example_of(int(row))) else f"{row}"
            for row in rows[:5]
        )
        messages.append(f"{kind} in '{path}', row{'s' * (len(rows) > 1)} {rows_text}{more}")
    return "; ".join(messages) or None


def _leaves(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        return {"": batch}
    return dict(leaves_with_path(dict(batch), is_leaf=lambda x: not isinstance(x, Mapping)))


def _expected_leaves(spec: Any, num_rows: int | None) -> dict[str, str]:
    expected = {}
    for path, leaf in _leaves(spec).items():
        shape = list(leaf.shape)
        if num_rows is not None and shape:
            shape[0] = num_rows
        expected[path] = f"{narrow_dtype(np.dtype(leaf.dtype))}{shape}"
    return expected


def _found(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return f"a {type(leaf).__name__}" if leaf is not None else "None"
    # 64-bit leaves are valid: JAX converts them to 32 bits.
    return f"{narrow_dtype(leaf.dtype)}{list(leaf.shape)}"


def _mismatch_message(subject: str, actual: Mapping[str, str], expected: Mapping[str, str]) -> str:
    fix = "Make every batch match the pipeline's element_spec."
    if "" in actual:
        return f"{subject} is {actual['']}; expected a dict of arrays: {sorted(expected)}. {fix}"
    if actual.keys() != expected.keys():
        return f"{subject} has the leaves {sorted(actual)}; expected {sorted(expected)}. {fix}"
    mismatches = [
        f"'{path}' is {actual[path]}, expected {shape}"
        for path, shape in expected.items()
        if actual[path] != shape
    ]
    return f"{subject} has wrong shapes or dtypes: {'; '.join(mismatches)}. {fix}"
