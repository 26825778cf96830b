"""The protocol for sources of pretrained arrays, and the initialization of all other arrays."""

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
    """Pretrained arrays from which a new job starts.

    The constructor takes a layout, and checks that the paths and logical shapes match the layout.
    Only `read` reads values.

    Attributes:
      paths: Paths of the arrays in a TrainState, such as "mdl_vars/params/...". All other weights
        are initialized at random, and all other slots and averages from the weights.
      step: The step at which the job starts.
    """

    @property
    def paths(self) -> Collection[str]: ...

    @property
    def step(self) -> int: ...

    def keep(self, files: JobDir) -> None:
        """Writes a report, or source files that the job needs, to the job directory."""
        ...

    def read(self, mesh: Mesh, note: Note) -> Mapping[str, jax.Array]:
        """Reads the arrays into their shards. All processes must call this together.

        Args:
          mesh: The mesh.
          note: Function that prints progress messages.

        Returns:
          The padded arrays, keyed by path.
        """
        ...


# A function of the value of a RunConfig setting and the layout of the job's TrainState.
Source = Callable[[Any, StateLayout], InitialState]


def begun(partitioner: Partitioner, key: jax.Array, source: InitialState, note: Note) -> TrainState:
    """Returns a new state with the arrays from a source, and initializes all other arrays."""
    return complete_state(partitioner, key, source.read(partitioner.mesh, note), source.step)


def random_weights(layout: StateLayout, arrays: Collection[str]) -> list[str]:
    """Returns the paths of the weights that are not in `arrays` and are initialized at random."""
    paths = [leaf.path for leaf in layout.select("mdl_vars").leaves()]
    return [path for path in paths if f"mdl_vars/{path}" not in arrays]


def complete_state(
    partitioner: Partitioner, key: jax.Array, arrays: Mapping[str, jax.Array], step: int = 0
) -> TrainState:
    """Returns a new state with the given arrays, and initializes all other arrays.

    All other weights have the same random values as with `init`, and no random values are computed
    for the given weights. All other slots and averages are initialized from the weights, as in Pax.

    Args:
      partitioner: Partitioner of the task, with its mesh.
      key: The random key.
      arrays: Padded and sharded arrays, keyed by their paths in a TrainState, such as
        "mdl_vars/params/...".
      step: The step of the state.
    """
    task, layout, arrays = partitioner.task, partitioner.layout, dict(arrays)
    arrays |= _missing_leaves(partitioner, "mdl_vars", arrays, task.model.init, key)
    mdl_layout = layout.select("mdl_vars")
    mdl_vars = jax.tree.unflatten(
        jax.tree.structure(mdl_layout.shapes),
        [arrays[f"mdl_vars/{leaf.path}"] for leaf in mdl_layout.leaves()],
    )

    def opt_states(mdl_vars: PyTree) -> PyTree:
        return partitioner.bound_learner.init(mdl_layout.unpad(mdl_vars)["params"])

    arrays |= _missing_leaves(partitioner, "opt_states", arrays, opt_states, mdl_vars)
    arrays["step"] = jax.device_put(jnp.int32(step), partitioner.replicated)
    leaves = [arrays[leaf.path] for leaf in layout.leaves()]
    return jax.tree.unflatten(jax.tree.structure(layout.shapes), leaves)


def _missing_leaves(
    partitioner: Partitioner,
    item: str,
    arrays: Mapping[str, jax.Array],
    make: Callable[[Any], PyTree],
    argument: Any,
) -> dict[str, jax.Array]:
    """Returns the leaves of `make(argument)` that are not in `arrays`, keyed by path.

    XLA removes the computation of leaves that are not outputs of the compiled function.
    """
    mesh, layout = partitioner.mesh, partitioner.layout.select(item)
    shardings = {
        f"{item}/{leaf.path}": leaf.sharding(mesh)
        for leaf in layout.leaves()
        if f"{item}/{leaf.path}" not in arrays
    }

    def missing(argument: Any) -> dict[str, jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            leaves = jax.tree.leaves(layout.pad(make(argument)))
        paths = [f"{item}/{leaf.path}" for leaf in layout.leaves()]
        return {path: x for path, x in zip(paths, leaves, strict=True) if path in shardings}

    return jax.jit(missing, out_shardings=shardings)(argument) if shardings else {}
