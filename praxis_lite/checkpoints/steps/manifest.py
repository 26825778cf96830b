"""A checkpoint's manifest: each array, each file, and where it comes from.

Orbax knows only the padded shapes of the mesh that saved. `manifest.json` has the unpadded ones
too, and size and digest of every file; `commit.json`, written last, has the digest of
`manifest.json`. The digests (XXH3-128) find damage; they are no signature.
"""

import functools
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from praxis_lite.core.errors import ConfigError, few

if TYPE_CHECKING:  # The tools read manifests without JAX.
    from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout

__all__ = ("digest_of_config", "new_manifest", "parse_manifest")

FORMAT = 2
MANIFEST_JSON, COMMIT_JSON = "manifest.json", "commit.json"
_PACKAGES = ("praxis_lite", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")

Leaves = Mapping[str, Mapping[str, Any]]


def new_manifest(
    step: int,
    layout: "StateLayout",
    data: Mapping[str, Any],
    metrics: Mapping[str, float],
    best: Mapping[str, Any] | None,
    config_digest: str,
) -> dict[str, Any]:
    """Returns the manifest of a state, but for its files.

    Args:
      data: the position of the training data, as JSON.
      best: the fields of the job's BestCheckpoints, or None if it has no such setting.
      config_digest: of `digest_of_config`, or "" if the config is not known.
    """
    leaves = {leaf.path: manifest_leaf(leaf) for leaf in layout.leaves() if leaf.path != "step"}
    return {
        "format": FORMAT, "step": step, "leaves": leaves, "files": {},
        "data": dict(data), "config_xxh3_128": config_digest, "versions": dict(_versions()),
        "mesh": dict(layout.axis_sizes), "metrics": dict(metrics), "best": best,
    }


def manifest_leaf(leaf: "LeafLayout") -> dict[str, Any]:
    """Returns a manifest's entry of an array, of JSON's types only."""
    return {
        "shape": list(leaf.shape),
        "padded_shape": list(leaf.padded_shape),
        "dtype": str(leaf.dtype),
        "spec": [list(e) if isinstance(e, tuple) else e for e in leaf.spec],
    }


def check_same(step_dir: Path, saved: Leaves, wanted: Leaves) -> None:
    """Checks that a step has just the arrays that are wanted.

    Raises:
      ConfigError: one side lacks a leaf of the other, or has it with another unpadded shape or
        dtype; names the step, the leaves, and both values of each.
    """
    actual = []
    # Sorted, the weights (mdl_vars) stand before their slots (opt_states).
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in wanted or path not in saved:
            actual.append(f"{path} is only in the {'model' if path in wanted else 'checkpoint'}")
            continue
        for what in ("shape", "dtype"):
            old, new = saved[path][what], wanted[path][what]
            if old != new:
                actual.append(f"{path} has {what} {old} in the checkpoint, {new} in the model")
    if actual:
        raise ConfigError(
            f"The checkpoint of step {step_dir.name} in {step_dir.parent} is of another model: "
            f"{few(actual, 5, '; ')}. Use the settings that it was trained with (see config.txt "
            "next to it), or start a new job in another job_log_dir."
        )


def digest_of_config(config_json: str) -> str:
    """Returns the digest of a job's config.json without the --set that it was made with."""
    config = json.loads(config_json)
    config.pop("overrides", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode())


def commit_text(step: int, manifest: bytes) -> str:
    """Returns the text of the commit.json that belongs to a manifest.json."""
    digest = xxhash.xxh3_128_hexdigest(manifest)
    return json.dumps({"step": step, "manifest_xxh3_128": digest}) + "\n"


def parse_manifest(text: bytes) -> dict[str, Any]:
    """Returns the manifest in a text whose digest was compared.

    Raises:
      ValueError: it has another format.
    """
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"has the format {manifest.get('format')!r}; this praxis_lite reads {FORMAT}"
        )
    return manifest


@functools.cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # Run from a checkout, not installed.
            versions[package] = ""
    return {**versions, "python": platform.python_version()}
