"""Lists, verifies and describes the steps in a directory of checkpoints."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from praxis_lite.checkpoints.steps.manifest import (
    COMMIT_JSON,
    MANIFEST_JSON,
    committed_manifest,
)
from praxis_lite.checkpoints.steps.step_store import steps_in
from praxis_lite.checkpoints.stored_arrays import stored_arrays
from praxis_lite.core.errors import ConfigError, Error, first_few, format_bytes
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.host.text_table import table_lines
from praxis_lite.job.local_directory import directory as directory_at

_Item = TypeVar("_Item")
_SET_ASIDE = {
    "damaged": "quarantined",
    "saving": "saving, or left by an interrupted save",
    "deleting": "deleting, or left by an interrupted deletion",
    "abandoned": "rolled back",
}


def tracked(items: Sequence[_Item]) -> Iterable[_Item]:
    """Yields the items, and shows a progress bar if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return items
    return track(items, "reading", console=console, transient=True)


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A folder in a directory of steps.

    Attributes:
      name: Name of the folder, such as "300", "300.damaged" or "400.saving".
      state: "good", or a description of the problem.
      num_bytes: Total size of the folder's files.
      saved: Time of the save in Unix seconds, or NaN if there is no commit.
      metrics: The metrics that were saved with the step.
    """

    name: str
    state: str
    num_bytes: int
    saved: float
    metrics: Mapping[str, float]


def steps_directory(path: str) -> AnyPath:
    """Returns the directory of steps, given its path or the path of its job.

    Raises:
      ConfigError: The directory does not exist, or contains no steps.
    """
    given = directory_at(path)
    if not given.is_dir():
        raise ConfigError(
            f"{given} is not a directory. Pass a job_log_dir, or the folder 'checkpoints' in it."
        )
    for directory in (given / "checkpoints", given):
        steps = steps_in(directory)
        if steps.numbered() or steps.folders_of_kind(*_SET_ASIDE):
            return directory
    if given.name.isdigit() and (given / MANIFEST_JSON).exists():
        raise ConfigError(
            f"{given} is a single step. Pass {given.parent} and --step={given.name} instead."
        )
    raise ConfigError(
        f"{given} contains no checkpoints. Pass a job_log_dir, or the folder 'checkpoints' in it."
    )


def step_dir_of(directory: AnyPath, step: int | None) -> AnyPath:
    """Returns the folder of a committed step.

    Args:
      directory: The directory of steps.
      step: The step, or None for the newest step.

    Raises:
      ConfigError: The step does not exist.
    """
    steps = steps_in(directory).committed()
    if not steps or (step is not None and step not in steps):
        existing = f"it has the steps {', '.join(map(str, steps))}" if steps else "it has no steps"
        missing = "step" if step is None else f"step {step}"
        raise ConfigError(f"{directory} has no committed {missing}; {existing}.")
    return directory / str(steps[-1] if step is None else step)


def manifest_of(step_dir: AnyPath) -> dict[str, Any]:
    """Returns a step's manifest.

    Raises:
      ConfigError: The manifest or the commit is damaged.
    """
    manifest, errors = committed_manifest(step_dir)
    if errors:
        raise ConfigError(f"The checkpoint {step_dir} is damaged: {'; '.join(errors)}.")
    return manifest


def list_steps(directory: AnyPath) -> list[ListedStep]:
    """Verifies and lists all steps in a directory, and lists folders that were set aside."""
    listed, steps = [], steps_in(directory)
    for name in tracked([str(step) for step in steps.numbered()]):
        errors = step_errors(directory / name)
        # Skip a step that a running job deleted while the step was being verified.
        if not errors or (directory / name).exists():
            listed.append(_listed_step(directory / name, first_few(errors, 2, "; ") or "good"))
    for name in steps.folders_of_kind(*_SET_ASIDE):
        kind = name.partition(".")[2].partition("-")[0].partition(".")[0]
        listed.append(_listed_step(directory / name, _SET_ASIDE.get(kind, kind)))
    return sorted(listed, key=lambda step: (int(step.name.partition(".")[0]), step.name))


def step_errors(step_dir: AnyPath) -> list[str]:
    """Returns a line for each error in a step's files, without decoding arrays."""
    try:
        lines = steps_in(step_dir.parent).verify(step_dir.name)
        return [f"damaged: {line}" for line in lines]
    except Error as error:
        return [f"foreign: {error}"]


def decoded_step_errors(step_dir: AnyPath) -> list[str]:
    """Decodes all arrays in a step and checks their padding; returns a line for each error."""
    if errors := step_errors(step_dir):
        return errors
    try:
        for array in tracked(list(stored_arrays(step_dir, manifest_of(step_dir)).values())):
            try:
                if not array.padding_is_zero():
                    errors.append(f"the padding of {array.path} is not zero")
            except Error as error:
                errors.append(str(error))
    except Error as error:
        errors.append(str(error))
    return errors


def description(step_dir: AnyPath) -> list[str]:
    """Returns lines with the size, mesh, versions, data position, metrics and arrays of a step."""
    manifest = manifest_of(step_dir)
    listed = _listed_step(step_dir, "")
    manifest_share = (step_dir / MANIFEST_JSON).stat().st_size / max(listed.num_bytes, 1)
    leaves = manifest["leaves"]
    pairs = {
        "step": f"{manifest['step']}, saved {_when(listed.saved)}",
        "size": f"{format_bytes(listed.num_bytes)} in {len(manifest['files'])} files, "
        f"{manifest_share:.1%} of it in the manifest",
        "mesh": _pairs(manifest["mesh"]),
        "versions": _pairs(manifest["versions"]),
        "config": manifest["config_xxh3_128"] or "not known",
        "data": json.dumps(manifest["data"]),
        "metrics": _pairs(manifest["metrics"]),
        "best": json.dumps(manifest["best"]),
        "arrays": f"{len(leaves)}, {sum(math.prod(x['shape']) for x in leaves.values()):,} values",
    }
    rows = [("path", "shape", "padded", "dtype", "spec", "bytes")]
    for path, leaf in sorted(leaves.items()):
        shape, padded, dtype = leaf["shape"], leaf["padded_shape"], leaf["dtype"]
        num_bytes = math.prod(padded) * np.dtype(dtype).itemsize
        shapes = str(shape), "" if padded == shape else str(padded)
        rows.append((path, *shapes, dtype, _spec(leaf["spec"]), f"{num_bytes:,}"))
    return [f"{key + ':':10}{value}" for key, value in pairs.items()] + ["", *table_lines(rows)]


def listing(steps: Sequence[ListedStep]) -> list[str]:
    """Formats the result of `list_steps` as a table."""
    return table_lines(
        [
            ("step", "size", "saved", "state", "metrics"),
            *(
                (x.name, format_bytes(x.num_bytes), _when(x.saved), x.state, _pairs(x.metrics))
                for x in steps
            ),
        ]
    )


def _when(seconds: float) -> str:
    """Formats Unix seconds as local time, such as "2026-11-21 20:33:01", or "-" for NaN."""
    return "-" if math.isnan(seconds) else time.strftime("%F %T", time.localtime(seconds))


def _listed_step(step_dir: AnyPath, state: str) -> ListedStep:
    files, metrics = steps_in(step_dir.parent).files(step_dir.name), {}
    num_bytes = sum(status.st_size for status in files.values())
    saved = files[COMMIT_JSON].st_mtime if COMMIT_JSON in files else math.nan
    with contextlib.suppress(ConfigError):
        metrics = committed_manifest(step_dir)[0].get("metrics", {})
    return ListedStep(step_dir.name, state, num_bytes, saved, metrics)


def _pairs(values: Mapping[str, Any]) -> str:
    texts = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in values.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items()) or "none"


def _spec(spec: Sequence[Any]) -> str:
    entries = ["+".join(map(str, e)) if isinstance(e, list) else str(e or "-") for e in spec]
    return f"({', '.join(entries)})"
