"""A checkpoint's manifest: each array, each file, and where it comes from.

Orbax knows only the padded shapes of the mesh that saved. `manifest.json` has the unpadded ones
too, and size and digest of every file; `commit.json`, written last, has the digest of
`manifest.json`. The digests (XXH3-128) find damage; they are no signature.
"""

import functools
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from praxis_lite.core.errors import ConfigError, few

if TYPE_CHECKING:  # The tools read manifests without JAX.
    from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout

FORMAT = 2
MANIFEST_JSON, COMMIT_JSON = "manifest.json", "commit.json"
# A few hundred bytes per leaf and per file: no honest manifest is larger.
_MOST_BYTES = 1 << 30
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
    return {
        "format": FORMAT, "step": step, "leaves": manifest_leaves(layout), "files": {},
        "data": dict(data), "config_xxh3_128": config_digest, "versions": dict(_versions()),
        "mesh": dict(layout.axis_sizes), "metrics": dict(metrics), "best": best,
    }


def manifest_leaves(layout: "StateLayout") -> dict[str, dict[str, Any]]:
    """Returns by path a manifest's entry of each array: JSON's types only. `step` is apart."""
    return {leaf.path: manifest_leaf(leaf) for leaf in layout.leaves() if leaf.path != "step"}


def manifest_leaf(leaf: "LeafLayout") -> dict[str, Any]:
    """Returns a manifest's entry of an array."""
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
    if not actual:
        return
    advice = (
        "Use the settings that it was trained with (see config.txt beside it), or start a new job "
        "in another job_log_dir."
    )
    if moved := _slots_of_whole_stacks(saved, wanted):
        advice = (
            f"Slots such as {moved} were of a whole stack, and are now of each layer: earlier "
            "versions did not know it as a stack (CHANGELOG.md). Start a new job from the weights, "
            "in another job_log_dir, with run.init_from_checkpoint_rules (docs/training.md); its "
            "slots begin anew."
        )
    raise ConfigError(
        f"The checkpoint of step {step_dir.name} in {step_dir.parent} is of another model: "
        f"{few(actual, 5, '; ')}. {advice}"
    )


def _slots_of_whole_stacks(saved: Leaves, wanted: Leaves) -> str | None:
    """Returns a slot of a weight that is a stack in the model alone, if there is any."""
    of_layers = {re.sub(r"\bstack_[\dx]+/", "unstacked/", path) for path in wanted.keys() - saved}
    return next(iter(sorted(of_layers & (saved.keys() - wanted.keys()))), None)


def digest_of_config(config_json: str) -> str:
    """Returns the digest of a job's config.json, whatever --set it was made with."""
    config = json.loads(config_json)
    config.pop("overrides", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode())


def commit_text(step: int, manifest: bytes) -> str:
    """Returns the text of the commit.json that belongs to a manifest.json."""
    digest = xxhash.xxh3_128_hexdigest(manifest)
    return json.dumps({"step": step, "manifest_xxh3_128": digest}) + "\n"


def read_small(path: Path) -> bytes:
    """Returns a JSON file's bytes.

    Raises:
      OSError: it cannot be read, or is a link.
      ValueError: it is too large.
    """
    # O_NONBLOCK: opening a named pipe would wait for ever.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        if os.fstat(file).st_size > _MOST_BYTES:
            raise ValueError(f"is larger than {_MOST_BYTES} bytes")
        return opened.read()


def parse_manifest(text: bytes) -> dict[str, Any]:
    """Returns the manifest that a text is.

    Raises:
      ValueError: something is wrong with it; says what, to stand behind its name.
    """

    def check(condition: bool, wrong: str) -> None:
        if not condition:
            raise ValueError(f"is no manifest: {wrong}")

    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    check(isinstance(manifest, dict), "it is no JSON object")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"has the format {manifest.get('format')!r}; this praxis_lite reads {FORMAT}"
        )
    for name, expected in _TYPES.items():
        is_right = isinstance(manifest.get(name), expected) and manifest[name] is not True
        check(is_right, f"its {name!r} is missing or of another type")
    for path, leaf in manifest["leaves"].items():
        check(_is_leaf(leaf), f"the leaf {path!r} is not described as one")
    for name, file in manifest["files"].items():
        check(_is_file(file), f"the file {name!r} is not described as one")
    are_numbers = all(type(value) in (int, float) for value in manifest["metrics"].values())
    check(are_numbers, "its metrics are no numbers")
    best = manifest["best"]
    is_best = best is None or best.keys() == {"metric", "mode", "max_to_keep"}
    check(is_best, "its 'best' is no BestCheckpoints")
    return manifest


_TYPES = {
    "step": int, "leaves": dict, "files": dict, "data": dict, "config_xxh3_128": str,
    "versions": dict, "mesh": dict, "metrics": dict, "best": dict | None,
}


def _is_leaf(leaf: Any) -> bool:
    if not isinstance(leaf, dict) or not isinstance(leaf.get("dtype"), str):
        return False
    shapes = leaf.get("shape"), leaf.get("padded_shape")
    if not all(isinstance(shape, list) for shape in shapes) or len(shapes[0]) != len(shapes[1]):
        return False
    dims = [dim for shape in shapes for dim in shape]
    return isinstance(leaf.get("spec"), list) and all(type(d) is int and d >= 0 for d in dims)


def _is_file(file: Any) -> bool:
    return (
        isinstance(file, dict)
        and type(file.get("size")) is int
        and isinstance(file.get("xxh3_128"), str)
    )


@functools.cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # Run from a checkout, not installed.
            versions[package] = ""
    return {**versions, "python": platform.python_version()}
