"""The manifest of a checkpoint, which describes its arrays, files and origin.

Orbax only stores shapes that are padded for the mesh on which the state was saved. `manifest.json`
adds the logical shapes, and the size and digest of every file (in an object store, the version
instead of the digest). `commit.json` is written last and contains the digest of `manifest.json`.
The digests (XXH3-128) detect damage but are not cryptographic signatures.
"""

import functools
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import xxhash

from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.host.object_stores import AnyPath

if TYPE_CHECKING:  # The tools read manifests without JAX.
    from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout

__all__ = ("committed_manifest", "digest_of_config", "new_manifest", "parse_manifest")

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
    """Returns the manifest of a state, without entries for files.

    Args:
      step: The step of the state.
      layout: Layout of the state.
      data: JSON data to save, such as the position in the training data.
      metrics: Metrics of the state.
      best: Fields of the job's BestCheckpoints, or None if it is not set.
      config_digest: Result of `digest_of_config`; "" if the config is unknown.
    """
    leaves = {leaf.path: manifest_leaf(leaf) for leaf in layout.leaves() if leaf.path != "step"}
    return {
        "format": FORMAT,
        "step": step,
        "leaves": leaves,
        "files": {},
        "data": dict(data),
        "config_xxh3_128": config_digest,
        "versions": dict(_versions()),
        "mesh": dict(layout.axis_sizes),
        "metrics": dict(metrics),
        "best": best,
    }


def manifest_leaf(leaf: "LeafLayout") -> dict[str, Any]:
    """Returns the entry of an array in a manifest, as JSON types."""
    return {
        "shape": list(leaf.shape),
        "padded_shape": list(leaf.padded_shape),
        "dtype": str(leaf.dtype),
        "spec": [list(e) if isinstance(e, tuple) else e for e in leaf.spec],
    }


def check_same(step_dir: AnyPath, saved: Leaves, expected: Leaves) -> None:
    """Checks that a step has exactly the expected arrays.

    Args:
      step_dir: The step's folder, for the error message.
      saved: Entries of the arrays in the step's manifest.
      expected: Entries of the arrays in the model.

    Raises:
      ConfigError: A leaf is missing on one side, or its logical shape or dtype differs. The message
        contains both values.
    """
    differences = []
    # In sorted order, weights (mdl_vars) precede their slots (opt_states).
    for path in sorted(saved.keys() | expected.keys()):
        if path not in expected or path not in saved:
            side = "model" if path in expected else "checkpoint"
            differences.append(f"{path} is only in the {side}")
            continue
        for field in ("shape", "dtype"):
            old, new = saved[path][field], expected[path][field]
            if old != new:
                differences.append(
                    f"{path} has {field} {old} in the checkpoint, but {new} in the model"
                )
    if differences:
        raise ConfigError(
            f"The checkpoint of step {step_dir.name} in {step_dir.parent} does not fit the model: "
            f"{first_few(differences, 5, '; ')}. Use the settings that the job was trained with "
            "(see its config.txt), or start a new job in a different job_log_dir."
        )


def digest_of_config(config_json: str) -> str:
    """Returns the digest of a job's config.json, excluding the list of --set overrides."""
    config = json.loads(config_json)
    config.pop("overrides", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode())


def commit_text(step: int, manifest: bytes) -> bytes:
    """Returns the content of commit.json for a manifest.json."""
    digest = xxhash.xxh3_128_hexdigest(manifest)
    return (json.dumps({"step": step, "manifest_xxh3_128": digest}) + "\n").encode()


def committed_manifest(step_dir: AnyPath) -> tuple[dict[str, Any], list[str]]:
    """Returns a step's manifest, and a list of errors in the manifest and the commit.

    Raises:
      ConfigError: Both files are undamaged, but have a different format version.
    """
    with ThreadPoolExecutor() as pool:
        reading = {
            name: pool.submit((step_dir / name).read_bytes) for name in (COMMIT_JSON, MANIFEST_JSON)
        }
    texts = {}
    for name, future in reading.items():
        try:
            texts[name] = future.result()
        except FileNotFoundError:
            return {}, [f"{name} is missing"]
        except OSError as error:
            return {}, [f"{name} cannot be read ({error.strerror})"]
    committed, text = texts[COMMIT_JSON], texts[MANIFEST_JSON]
    # Check the digest before parsing, so that damage is not reported as a different format.
    if xxhash.xxh3_128_hexdigest(text).encode() not in committed:
        return {}, [f"the digest of {MANIFEST_JSON} differs from {COMMIT_JSON}: one has changed"]
    try:
        manifest = parse_manifest(text)
    except ValueError as error:
        raise ConfigError(
            f"{step_dir / MANIFEST_JSON} {error}. Use the praxis_lite version that wrote it."
        ) from None
    step = manifest["step"]
    if committed != commit_text(step, text):
        return {}, [f"{COMMIT_JSON} has changed"]
    # Steps that are set aside have a suffix, as in "300.damaged".
    if str(step) != step_dir.name.partition(".")[0]:
        return {}, [f"{COMMIT_JSON} and {MANIFEST_JSON} belong to step {step}"]
    return manifest, []


def parse_manifest(text: bytes) -> dict[str, Any]:
    """Parses the content of a manifest.json whose digest was verified.

    Raises:
      ValueError: The manifest has a different format version.
    """
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"has format {manifest.get('format')!r}; this praxis_lite version reads format {FORMAT}"
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
