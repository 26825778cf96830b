"""Saves a state on six meshes, and checks that the digests are equal and all padding is zero."""

from pathlib import Path

import jax
import numpy as np

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import MeshConfig, Partitioner, make_mesh
from tests.faults.outcome import Row
from tests.faults.zoo import home

MESHES = ((1, 1, 1), (1, 2, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2), (1, 3, 2))
# (dims, hidden): sizes that no mesh divides evenly, and sizes that most meshes divide evenly.
SIZES = {"uneven": (5, 7), "even": (8, 16)}


def run(meshes=MESHES) -> list[Row]:
    """Returns a row for even and a row for uneven sizes, using this process's eight devices."""
    return [_row(name, dims, hidden, meshes) for name, (dims, hidden) in SIZES.items()]


def _row(name: str, dims: int, hidden: int, meshes) -> Row:
    row = Row(f"six meshes, {name} sizes: equal digests, zero padding", figures={"leaves": 0})
    first = home() / f"meshes_{name}" / "trained"
    digests = {}
    for number, shape in enumerate(meshes):
        partitioner = _partitioner(dims, hidden, shape)
        job = home() / f"meshes_{name}" / str(number)
        if number == 0:
            state = _trained(partitioner)
            _save(first, partitioner, state)
            digests["trained"] = digest_of(first / "checkpoints/1")
        with Checkpoints(first / "checkpoints") as saved:
            state = saved.restore(partitioner.layout, partitioner.mesh).state
        _save(job, partitioner, state)
        row.tried += 1
        digests[shape] = digest_of(job / "checkpoints/1")
        num_padded, wrong = _padding(partitioner, state)
        row.most("leaves", len(jax.tree.leaves(state)))
        row.most("max. padded leaves", num_padded)
        if digests[shape] != digests["trained"]:
            row.failures.append(f"{shape}: digest {digests[shape]}, expected {digests['trained']}")
        row.failures += [f"{shape}: the padding of {path} is not zero" for path in wrong]
    return row


def _partitioner(dims: int, hidden: int, shape: tuple[int, ...]) -> Partitioner:
    import fiddle as fdl

    home()
    from faultzoo.experiments import Tiny

    task = Tiny().task()
    task.model.init.dims, task.model.init.hidden = dims, hidden
    return Partitioner(fdl.build(task), make_mesh(MeshConfig(ici_mesh_shape=shape)))


def _trained(partitioner: Partitioner):
    """Returns a state after one step, so that slots and averages are not zero."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(11, 5)).astype(np.float32),
        "y": np.ones(11, np.float32),
        "weights": np.ones(11, np.float32),
    }
    key = partitioner.key(0)
    state = partitioner.init(key)
    return partitioner.train_step(state, partitioner.global_batch(batch, 11), key)[0]


def _save(job: Path, partitioner: Partitioner, state) -> None:
    with Checkpoints(job / "checkpoints", saving=SaveSettings(max_to_keep=2)) as saved:
        saved.save(1, state, partitioner.layout, {"next_batch": 1, "skipped": []})
        saved.wait()


def _padding(partitioner: Partitioner, state) -> tuple[int, list[str]]:
    """Returns the number of padded leaves, and the paths of leaves with nonzero padding."""
    num_padded, wrong = 0, []
    for leaf, x in zip(partitioner.layout.leaves(), jax.tree.leaves(state), strict=True):
        if leaf.shape != leaf.padded_shape:
            num_padded += 1
            padding = np.array(x)
            padding[tuple(slice(dim) for dim in leaf.shape)] = 0
            if padding.any():
                wrong.append(leaf.path)
    return num_padded, wrong
