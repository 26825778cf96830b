"""Where the state of a new job comes from: a protocol, and the creation of all other arrays."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout, TrainState
from praxis_lite.job.job_dir import JobDir

__all__ = ("Note",)

PyTree = Any
Note = Callable[[str], None]


class InitialState(Protocol):
    """Arrays that a new job begins with instead of drawing them.

    It is made of a layout, and then known to fit: the paths are of weights and slots of that
    layout, and their shapes are the true ones there. Nothing is read before `read`.

    Attributes:
      paths: of the arrays, in a TrainState: "mdl_vars/params/...". All others are drawn, and new
        slots and averages made of the weights.
      step: at which the job begins.
    """

    @property
    def paths(self) -> Collection[str]: ...

    @property
    def step(self) -> int: ...

    def keep(self, files: JobDir) -> None:
        """Writes into the job's directory any files of the source that it needs, or a report."""
        ...

    def read(self, mesh: Mesh, note: Note) -> Mapping[str, jax.Array]:
        """Returns the arrays by path, padded, in their shards; tells `note` how far it is.

        Several processes call it together; each makes the shards of its devices.
        """
        ...


# The value of a setting of RunConfig, and the layout of the job's TrainState.
Source = Callable[[Any, StateLayout], InitialState]


def begun(partitioner: Partitioner, key: jax.Array, source: InitialState, note: Note) -> TrainState:
    """Returns the new state that a source and a key give."""
    return completed(partitioner, key, source.read(partitioner.mesh, note), source.step)


def drawn(layout: StateLayout, arrays: Collection[str]) -> list[str]:
    """Returns the paths in mdl_vars of the weights that are not among these arrays."""
    paths = [leaf.path for leaf in layout.select("mdl_vars").leaves()]
    return [path for path in paths if f"mdl_vars/{path}" not in arrays]


def completed(
    partitioner: Partitioner, key: jax.Array, arrays: Mapping[str, jax.Array], step: int = 0
) -> TrainState:
    """Returns a new state with these arrays in it.

    What is not among them is drawn as `init` draws it; what is among them is not drawn at all. New
    slots and averages are made from the weights, as in Pax.

    Args:
      arrays: padded, in their shards, by path in a TrainState: "mdl_vars/params/...".
      step: that the state has.
    """
    task, layout, arrays = partitioner.task, partitioner.layout, dict(arrays)
    arrays |= _made(partitioner, "mdl_vars", arrays, task.model.init, key)
    mdl_layout = layout.select("mdl_vars")
    mdl_vars = jax.tree.unflatten(
        jax.tree.structure(mdl_layout.shapes),
        [arrays[f"mdl_vars/{leaf.path}"] for leaf in mdl_layout.leaves()],
    )

    def opt_states(mdl_vars: PyTree) -> PyTree:
        return partitioner.learner.init(mdl_layout.unpad(mdl_vars)["params"])

    arrays |= _made(partitioner, "opt_states", arrays, opt_states, mdl_vars)
    arrays["step"] = jax.device_put(jnp.int32(step), partitioner.replicated)
    leaves = [arrays[leaf.path] for leaf in layout.leaves()]
    return jax.tree.unflatten(jax.tree.structure(layout.shapes), leaves)


def _made(
    partitioner: Partitioner,
    item: str,
    arrays: Mapping[str, jax.Array],
    make: Callable[[Any], PyTree],
    argument: Any,
) -> dict[str, jax.Array]:
    """Returns the leaves that `make` makes and there are not yet; XLA leaves the rest out."""
    mesh, layout = partitioner.mesh, partitioner.layout.select(item)
    shardings = {
        f"{item}/{leaf.path}": leaf.sharding(mesh)
        for leaf in layout.leaves() if f"{item}/{leaf.path}" not in arrays
    }

    def missing(argument: Any) -> dict[str, jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            leaves = jax.tree.leaves(layout.pad(make(argument)))
        paths = [f"{item}/{leaf.path}" for leaf in layout.leaves()]
        return {path: x for path, x in zip(paths, leaves, strict=True) if path in shardings}

    return jax.jit(missing, out_shardings=shardings)(argument) if shardings else {}
