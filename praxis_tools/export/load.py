"""Loads the program in this folder with only jax: `outputs = load()({"ids": ids, ...})`."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

FORMAT = "praxis_lite program 1"


class Refused(SystemExit, ValueError):
    """Raised if the program cannot be loaded; if uncaught, the process exits with status 1."""


def load(folder: Path = Path(__file__).parent) -> Callable[[dict], object]:
    """Returns a function that runs the program on a dict of NumPy arrays.

    Args:
      folder: Directory with manifest.json, which lists the inputs' names, shapes and dtypes.

    Raises:
      Refused: A file is missing, damaged or from a different program, or jax has too few devices.
    """
    folder = Path(folder)
    about = manifest(folder)
    program = exported(folder, about["jax"])
    sizes, num, devices = about["mesh"], program.nr_devices, jax.devices()
    if len(devices) < num:
        raise Refused(f"{sizes} needs {num} devices; jax has {len(devices)}. {about['devices']}")
    mesh = Mesh(
        np.reshape(devices[:num], [*sizes.values()]),
        [*sizes],
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    shardings, _ = jax.tree.unflatten(program.in_tree, program.in_shardings_jax(mesh))
    arrays = stored_weights(folder, program.in_avals[: len(shardings[0])])
    weights = [jax.device_put(x, y) for x, y in zip(arrays, shardings[0], strict=True)]
    options = options_taken(about, mesh)
    run = jax.jit(program.call, in_shardings=shardings, compiler_options=options)
    return lambda inputs: jax.device_get(run(weights, inputs))


def manifest(folder: Path) -> dict:
    """Returns the contents of manifest.json, after comparing the digests of the other files."""
    path = folder / "manifest.json"
    try:
        about = json.loads(path.read_text("utf-8"))
        found = about["format"]
        if found != FORMAT:
            raise Refused(f"{folder} has format {found!r}; this load.py reads {FORMAT!r}.")
        for name, digest in about["sha256"].items():
            path = folder / name
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise Refused(
                        f"{path} is damaged: its SHA-256 differs from the manifest's. Copy or "
                        "export it again."
                    )
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Refused(f"{path} cannot be read: {reason}. Copy or export it again.") from error
    return about


def exported(folder: Path, writer: str) -> export.Exported:
    """Deserializes the program, which jax `writer` exported."""
    try:
        program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
        program.mlir_module()
    except Exception as error:
        raise Refused(
            f"jax {jax.__version__} cannot read a program that jax {writer} wrote. "
            "Install that version, or export the program again."
        ) from error
    return program


def stored_weights(folder: Path, avals: Sequence) -> Iterator[np.ndarray]:
    """Yields the weights in the program's order, with the program's dtypes."""
    with np.load(folder / "weights.npz") as arrays:
        for name, aval in zip(arrays.files, avals, strict=True):
            # Types that NumPy does not support, such as bfloat16, are stored as raw bytes.
            yield arrays[name].view(aval.dtype)


def options_taken(about: dict, mesh: Mesh) -> dict:
    """Returns the recorded compiler options that this jaxlib accepts, and warns about the rest."""
    taken: dict = {}
    replicated, backend = NamedSharding(mesh, PartitionSpec()), jax.default_backend()
    for name, value in (about["compiler_options"].get(backend) or {}).items():
        option = {name: value}
        try:
            jax.jit(lambda: 0, out_shardings=replicated, compiler_options=option).lower().compile()
            taken |= option
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).rstrip(".")
            warnings.warn(
                f"The compiler option {name}={value} of the exported program is ignored: {reason}. "
                "Speed and memory may differ. Correct compiler_options in manifest.json.",
                stacklevel=3,
            )
    return taken
