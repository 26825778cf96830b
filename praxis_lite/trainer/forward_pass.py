"""A model's own call, compiled for a mesh, on arrays of any shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.task import Task
from praxis_lite.host.host_memory import FirstRuns
from praxis_lite.inputs.batch_arrays import narrow
from praxis_lite.inputs.text.token_ids import token_ids

__all__ = ("LEAVES_OF_ARGUMENTS", "arrays_of", "forward_on_the_mesh")

# What models call the leaves of a batch.
LEAVES_OF_ARGUMENTS = {"positions": "segment_pos", "inputs": "src_ids", "targets": "ids"}


def forward_pass(partitioner: Partitioner) -> Callable[..., Any]:
    """Returns `call(mdl_vars, *args, **named)`: what `model(*args, **named)` returns, as NumPy.

    Arrays among the arguments, or in trees there, have rows first, which are split over the mesh
    like those of a batch. Other arguments, such as flags, reach the model unchanged. A model of
    plain functions has no call; `task.predict(params, *args, None)` is used instead.
    """
    compiled = jax.jit(
        forward_on_the_mesh(partitioner), static_argnums=2, out_shardings=partitioner.replicated
    )
    runs = FirstRuns("The model's call", "Give it fewer rows at a time.")

    def call(mdl_vars: Any, *args: Any, **named: Any) -> Any:
        arrays, given = arrays_of(args, named)
        if not arrays:
            raise ConfigError(
                f"predict was given {shown(repr((*args, *named.values())))}, in which there is no "
                "array. Give it NumPy arrays as the model's call takes them, rows first: "
                "predict(np.asarray(...))."
            )
        arrays = [
            narrow("predict", f"of argument {place}", np.asarray(x)) for place, x in arrays.items()
        ]
        inputs = mdl_vars, partitioner.global_batch(arrays), given
        shapes = *given, tuple((x.shape, x.dtype) for x in arrays)
        return jax.device_get(runs.run(compiled, *inputs, key=shapes))

    return call


def arrays_of(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[dict[int, Any], tuple]:
    """Returns the arrays among the arguments of a call by their places, and all the rest of it.

    These are the last two arguments of `forward_on_the_mesh`'s function: the arrays as a list.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(named)))
    others = tuple((True, None) if _is_array(x) else (False, x) for x in leaves)
    return {place: x for place, x in enumerate(leaves) if _is_array(x)}, (structure, others)


def forward_on_the_mesh(partitioner: Partitioner) -> Callable[..., Any]:
    """Returns the function of (mdl_vars, arrays, rest) that `forward_pass` compiles.

    The rest is static; both are of `arrays_of`, and the arrays a GlobalBatch.
    """
    task = partitioner.task

    def forward(mdl_vars: Any, arrays: list[jax.Array], given: tuple) -> Any:
        structure, others = given
        leaves = iter(task.cast_inputs(dict(enumerate(arrays))).values())
        args, named = jax.tree.unflatten(
            structure, [next(leaves) if is_array else x for is_array, x in others]
        )
        model = task.module(mdl_vars)
        if callable(model):
            return model(*args, **named)
        if task.predict is None:
            raise ConfigError(
                "A model of plain functions has no call of its own. Give its task a function "
                "predict(params, inputs, key)."
            )
        return task.predict(model, *args, None, **named)

    return partitioner.with_mdl_vars(forward, static_argnums=2)


def check_call(task: Task, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Checks the ids and positions among the arguments of a model's call.

    Raises:
      ConfigError: the model has no row or no position for one; they are no integers.
    """
    sizes = task.num_ids()
    if not {"ids", "src_ids"} & sizes.keys():
        return
    # A model of sources and targets, or of ids, by any argument names.
    order = ("src_ids", "ids") if "src_ids" in sizes else ("ids",)
    given = dict(zip(order, args, strict=False)) | {
        LEAVES_OF_ARGUMENTS.get(name, name): x for name, x in named.items()
    }
    paddings = given.get("paddings")
    for name, size in sizes.items():
        x = given.get(name)
        if not _is_array(x):
            continue
        counts = np.asarray(paddings) < 0.5 if np.shape(paddings) == np.shape(x) else None
        token_ids(x, f"predict: {name}", size, ndim=np.ndim(x), counts=counts)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
