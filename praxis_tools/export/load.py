"""Loads the program in this folder with only jax: `outputs = load()({"ids": ids, ...})`."""

import contextlib
import hashlib
import json
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

FORMAT, AUTO = "praxis_lite program 1", (AxisType.Auto,)
FIELDS = {
    "jax": str,
    "devices": str,
    "sha256": dict,
    "mesh": dict,
    "weights": dict,
    "compiler_options": dict,
}


def load(folder: Path = Path(__file__).parent) -> Callable[[dict], object]:
    """Returns a function that runs the program on a dict of NumPy arrays.

    Args:
      folder: Directory with manifest.json, which lists the inputs' names, shapes and dtypes.

    Raises:
      Refused: A file is missing, damaged or from a different program, or jax has too few devices.
    """
    archive = Archive(Path(folder))
    about, program = archive.about, archive.program()
    mesh, num, devices = about["mesh"], program.nr_devices, jax.devices()
    if len(devices) < num:
        raise Refused(f"{mesh} needs {num} devices; jax has {len(devices)}. {about['devices']}")
    with archive.reading("manifest.json"):
        mesh = Mesh(
            np.reshape(devices[:num], [*mesh.values()]), [*mesh], axis_types=AUTO * len(mesh)
        )
        shardings, _ = jax.tree.unflatten(program.in_tree, program.in_shardings_jax(mesh))
    arrays = archive.weights(program.in_avals[: len(shardings[0])])
    weights = [jax.device_put(x, y) for x, y in zip(arrays, shardings[0], strict=True)]
    options = options_taken(about, mesh)
    run = jax.jit(program.call, in_shardings=shardings, compiler_options=options)
    return lambda inputs: jax.device_get(run(weights, inputs))


class Refused(SystemExit, ValueError):
    """Raised if the program cannot be loaded; if uncaught, the process exits with status 1."""


class Archive:
    """The files of an exported program, which are verified when they are read.

    Attributes:
      folder: Directory that contains the files.
      about: Contents of manifest.json.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with self.reading("manifest.json"):
            self.about = json.loads((folder / "manifest.json").read_text("utf-8"))
            found = self.about["format"]
            if found != FORMAT:
                raise Refused(f"{folder} has format {found!r}; this load.py reads {FORMAT!r}.")
            for name, kind in FIELDS.items():
                if not isinstance(self.about[name], kind):
                    raise TypeError(f"{name} is {self.about[name]!r}")
        for name in ("program.bin", "weights.npz"):
            with self.reading(name), (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.about["sha256"].get(name):
                raise Refused(
                    f"{folder / name} is damaged: its SHA-256 differs from the "
                    "manifest's. Copy or export it again."
                )

    def program(self) -> export.Exported:
        """Deserializes the program."""
        content = bytearray((self.folder / "program.bin").read_bytes())
        try:
            program = export.deserialize(content)
            program.mlir_module()
        except Exception as error:
            writer = self.about["jax"]
            raise Refused(
                f"jax {jax.__version__} cannot read a program that jax {writer} wrote. "
                "Install that version, or export the program again."
            ) from error
        return program

    def weights(self, avals: Sequence) -> Iterator[np.ndarray]:
        """Yields the weights, checking that their shapes and dtypes match the program."""
        # np.load would leave the file open if an array is damaged.
        with self.reading("weights.npz"), zipfile.ZipFile(self.folder / "weights.npz") as archive:
            names = [file.removesuffix(".npy") for file in archive.namelist()]
            for name in {*names} ^ {*self.about["weights"]}:
                where = "weights.npz" if name in names else "the manifest"
                raise ValueError(f"{name} is only in {where}; expected it in both")
            for name, aval in zip(names, avals, strict=True):
                with archive.open(f"{name}.npy") as file:
                    x = np.lib.format.read_array(file, allow_pickle=False)
                # Types that NumPy does not support, such as bfloat16, are stored as raw bytes.
                raw = np.dtype(f"V{aval.dtype.itemsize}")
                if x.shape != aval.shape or x.dtype not in (aval.dtype, raw):
                    raise ValueError(
                        f"{name} is {x.dtype}{[*x.shape]}; the program takes "
                        f"{aval.dtype}{[*aval.shape]}"
                    )
                yield x.view(aval.dtype)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Context manager that converts errors while reading a file into `Refused`."""
        try:
            yield
        except Refused:
            raise
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            EOFError,
            RecursionError,
            NotImplementedError,
            zipfile.BadZipFile,
        ) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise Refused(
                f"{self.folder / name} cannot be read: {reason}. Copy or export it again."
            ) from error


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
