"""A new state that starts from other checkpoints, each array read into its shards."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import LeafLayout, TrainState
from praxis_lite.run.checkpoints.init.init_plan import InitPlan
from praxis_lite.run.checkpoints.init.sources import opened

PyTree = Any


def init_from_checkpoints(partitioner: Partitioner, key: jax.Array, plan: InitPlan) -> TrainState:
    """Returns a new state, each array in its shards; in place of `partitioner.init(key)`.

    See `completed` for what the plan does not load.
    """
    step = plan.step[0] if plan.step else 0
    return completed(partitioner, key, _loaded(plan, partitioner.mesh), step)


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


def _loaded(plan: InitPlan, mesh: Mesh) -> dict[str, jax.Array]:
    wanted, arrays = {leaf.path: leaf for leaf in plan.layout.leaves()}, {}

    def as_stored(path: str) -> LeafLayout:
        dtype = plan.sources[path].cast_from or wanted[path].dtype
        return dataclasses.replace(wanted[path], dtype=dtype)

    # In the order of the plan: several processes must read in the same one.
    for directory, step in dict.fromkeys(source[:2] for source in plan.sources.values()):
        left = {
            path: source.path for path, source in plan.sources.items()
            if source[:2] == (directory, step)
        }
        with opened(directory) as saved:
            while left:
                # One array may be what several start from: each time it is read for one of them.
                targets = {source: path for path, source in left.items()}
                found = saved.restore_leaves(
                    {source: as_stored(path) for source, path in targets.items()}, mesh, step=step
                )
                for source, path in targets.items():
                    arrays[path] = found[source].astype(wanted[path].dtype)
                    del left[path]
    return arrays


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
        f"{item}/{leaf.path}": NamedSharding(mesh, leaf.spec)
        for leaf in layout.leaves() if f"{item}/{leaf.path}" not in arrays
    }

    def missing(argument: Any) -> dict[str, jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            leaves = jax.tree.leaves(layout.pad(make(argument)))
        paths = [f"{item}/{leaf.path}" for leaf in layout.leaves()]
        return {path: x for path, x in zip(paths, leaves, strict=True) if path in shardings}

    return jax.jit(missing, out_shardings=shardings)(argument) if shardings else {}
