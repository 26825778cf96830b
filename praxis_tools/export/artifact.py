"""Writes an exported program to a directory: the program, its weights, a manifest and a loader."""

import hashlib
import importlib.metadata
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_tools.export import load
from praxis_tools.export.program import Program

PROGRAM, WEIGHTS, MANIFEST, LOADER = "program.bin", "weights.npz", "manifest.json", "load.py"


def write_artifact(
    folder: Path,
    program: Program,
    partitioner: Partitioner,
    weights: Any,
    about: Mapping[str, Any],
) -> dict[str, int]:
    """Writes a program, its weights, a manifest and the loader to a directory.

    Args:
      folder: Existing directory to write to.
      program: The exported program.
      partitioner: Partitioner that the program was exported from.
      weights: Tree of arrays with the program's layout.
      about: Additional metadata for the manifest, as JSON values.

    Returns:
      A dict that maps each file name to the size of the file in bytes.
    """
    (folder / PROGRAM).write_bytes(program.exported.serialize())
    _write_weights(folder / WEIGHTS, program, weights)
    (folder / LOADER).write_bytes(Path(load.__file__).read_bytes())
    manifest = _manifest(program, partitioner, about) | {
        "sha256": {name: _sha256(folder / name) for name in (PROGRAM, WEIGHTS)}
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _write_weights(path: Path, program: Program, weights: Any) -> None:
    """Writes the same file as `np.savez`, but transfers the weights to the host one at a time."""
    leaves = program.layout.leaves()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for leaf, x in zip(leaves, jax.tree.leaves(weights), strict=True):
            with archive.open(f"{leaf.path}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(x), allow_pickle=False)


def _manifest(
    program: Program, partitioner: Partitioner, about: Mapping[str, Any]
) -> dict[str, Any]:
    exported, mesh = program.exported, partitioner.mesh
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    devices = f"The program runs on {' or '.join(exported.platforms)}."
    if "cpu" in exported.platforms:
        devices += f" On CPU, set JAX_NUM_CPU_DEVICES={mesh.size} in the environment."
    return {
        "format": load.FORMAT,
        **about,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "calling_convention_version": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "devices": devices,
        "mesh": dict(mesh.shape),
        # Maps a backend to its options; other backends compile without options.
        "compiler_options": {mesh.devices.flat[0].platform: program.compiler_options},
        "disabled_checks": [str(check) for check in exported.disabled_safety_checks],
        "inputs": {name: _describe(x, x.sharding.spec) for name, x in program.inputs.items()},
        "outputs": {path: _describe(x) for path, x in leaves_with_path(outputs)},
        "weights": {
            leaf.path: _describe(leaf, leaf.spec) | {"padded_shape": list(leaf.padded_shape)}
            for leaf in program.layout.leaves()
        },
    }


def _describe(x: Any, spec: PartitionSpec | None = None) -> dict[str, Any]:
    """Returns an array's shape, dtype and full-rank PartitionSpec as JSON values."""
    shape = [dim if isinstance(dim, int) else str(dim) for dim in x.shape]
    full_spec = {} if spec is None else {"spec": [*spec, *[None] * (len(shape) - len(spec))]}
    return {"shape": shape, "dtype": np.dtype(x.dtype).name} | full_spec


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
