"""Loads what lies beside this file with jax alone: `outputs = load()({"ids": ids, ...})`."""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AUTO = (AxisType.Auto,)


def load(folder: Path = Path(__file__).parent) -> Callable[[dict], object]:
    """Returns a function of a dict of NumPy arrays, as manifest.json describes its inputs."""
    about = json.loads((folder / "manifest.json").read_text())
    for name, digest in about["sha256"].items():
        if hashlib.sha256(np.memmap(folder / name, mode="r")).hexdigest() != digest:
            raise ValueError(f"{folder / name} is damaged: its SHA-256 is not {digest}.")
    try:
        program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
        program.mlir_module()
    except Exception as error:
        raise ValueError(f"jax {jax.__version__} cannot read what {about['jax']} wrote.") from error
    mesh, num, devices = about["mesh"], program.nr_devices, jax.devices()
    if len(devices) < num:
        raise ValueError(f"{mesh} needs {num} devices; jax has {len(devices)}. {about['devices']}")
    mesh = Mesh(np.reshape(devices[:num], [*mesh.values()]), [*mesh], axis_types=AUTO * len(mesh))
    places, _ = jax.tree.unflatten(program.in_tree, program.in_shardings_jax(mesh))
    with np.load(folder / "weights.npz") as arrays:
        listed = zip(arrays, program.in_avals, places[0], strict=False)
        weights = [jax.device_put(arrays[n].view(x.dtype), place) for n, x, place in listed]
    options = options_taken(about, mesh)
    run = jax.jit(program.call, in_shardings=places, compiler_options=options)
    return lambda inputs: jax.device_get(run(weights, inputs))


def options_taken(about: dict, mesh: Mesh) -> dict:
    """Returns the recorded options that this compiler takes; warns of each that it does not."""
    taken, whole, backend = {}, NamedSharding(mesh, PartitionSpec()), jax.default_backend()
    for name, value in (about["compiler_options"].get(backend) or {}).items():
        option = {name: value}
        try:
            jax.jit(lambda: 0, out_shardings=whole, compiler_options=option).lower().compile()
            taken |= option
        except jax.errors.JaxRuntimeError as error:
            reason = f"{str(error).rstrip('.')}."
            try:  # Where it is installed, it knows today's names of former options.
                from praxis_lite.core.sharding.devices.xla_options import not_known

                if "No such compile option" in reason:
                    reason = not_known(name, "libtpu" if backend == "tpu" else "jaxlib")
            except ImportError:
                pass
            warnings.warn(
                f"{name}={value}, with which the program was exported, is left out: {reason} Its "
                "speed and memory may differ. Correct compiler_options in manifest.json.",
                stacklevel=3,
            )
    return taken
