"""Compiles the model's forward pass for a mesh, for arguments of any shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.task import Task
from praxis_lite.host.host_memory import FirstRuns
from praxis_lite.inputs.batch_arrays import narrow
from praxis_lite.inputs.text.token_ids import token_ids

__all__ = ("LEAVES_OF_ARGUMENTS", "arrays_of", "forward_on_the_mesh")

# Maps argument names in a model's call to the batch leaves that have different names.
LEAVES_OF_ARGUMENTS = {"positions": "segment_pos", "inputs": "src_ids", "targets": "ids"}


def forward_pass(partitioner: Partitioner) -> Callable[..., Any]:
    """Returns `call(mdl_vars, *args, **kwargs)`, which computes `model(*args, **kwargs)`.

    The first dim of every array in the arguments, including arrays in nested trees, must be the
    batch dim. This dim is sharded over the mesh as in a training batch. All other arguments, such
    as flags, are static. For a model of plain functions, `call` computes
    `task.predict(params, *args, None)`.

    Args:
      partitioner: Partitioner of the task, with its mesh.

    Returns:
      The function, which returns NumPy arrays and compiles once for each combination of shapes.
    """
    compiled = jax.jit(
        forward_on_the_mesh(partitioner), static_argnums=2, out_shardings=partitioner.replicated
    )
    runs = FirstRuns("The model's call", "Pass fewer rows at a time.")

    def call(mdl_vars: Any, *args: Any, **kwargs: Any) -> Any:
        arrays, static = arrays_of(args, kwargs)
        if not arrays:
            raise ConfigError(
                f"predict was given {shortened(repr((*args, *kwargs.values())))}, which contains "
                "no arrays. Pass the model's inputs as NumPy arrays whose first dim is the batch: "
                "predict(np.asarray(...))."
            )
        rows = [
            narrow("predict", f"of argument {index}", np.asarray(x)) for index, x in arrays.items()
        ]
        inputs = mdl_vars, partitioner.global_batch(rows), static
        shapes = *static, tuple((x.shape, x.dtype) for x in rows)
        return jax.device_get(runs.run(compiled, *inputs, key=shapes))

    return call


def arrays_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[int, Any], tuple]:
    """Splits the arguments of a call into arrays and static values.

    Args:
      args: Positional arguments; arrays may be nested in trees.
      kwargs: Keyword arguments.

    Returns:
      A tuple of the arrays, keyed by their index among all leaves, and a hashable value with the
      tree structure and all other leaves. The function from `forward_on_the_mesh` takes a list of
      the arrays and this value.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    others = tuple((True, None) if _is_array(x) else (False, x) for x in leaves)
    return {index: x for index, x in enumerate(leaves) if _is_array(x)}, (structure, others)


def forward_on_the_mesh(partitioner: Partitioner) -> Callable[..., Any]:
    """Returns the function (mdl_vars, arrays, static) that `forward_pass` compiles.

    `static` and the arrays come from `arrays_of`. The arrays are passed as a list in a GlobalBatch.
    """
    task = partitioner.task

    def forward(mdl_vars: Any, arrays: list[jax.Array], static: tuple) -> Any:
        structure, others = static
        leaves = iter(task.cast_inputs(dict(enumerate(arrays))).values())
        # Insert the arrays between the static arguments.
        args, kwargs = jax.tree.unflatten(
            structure, [next(leaves) if is_array else x for is_array, x in others]
        )
        model = task.module(mdl_vars)
        if callable(model):
            return model(*args, **kwargs)
        if task.predict is None:
            raise ConfigError(
                "predict requires the task to have a `predict` function, because the model "
                "consists of plain functions. Pass predict(params, inputs, key) to the task."
            )
        return task.predict(model, *args, None, **kwargs)

    return partitioner.with_mdl_vars(forward, static_argnums=2)


def check_call(task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the ids and positions in the arguments of a model's call.

    Args:
      task: The model's task.
      args: Positional arguments.
      kwargs: Keyword arguments.

    Raises:
      ConfigError: An id or a position is out of range, or is not an integer.
    """
    sizes = task.num_ids()
    if not {"ids", "src_ids"} & sizes.keys():
        return
    # Positional arguments are ids, or source ids followed by target ids, regardless of their names.
    order = ("src_ids", "ids") if "src_ids" in sizes else ("ids",)
    leaves = dict(zip(order, args, strict=False)) | {
        LEAVES_OF_ARGUMENTS.get(name, name): x for name, x in kwargs.items()
    }
    paddings = leaves.get("paddings")
    for name, size in sizes.items():
        x = leaves.get(name)
        if x is None or not _is_array(x):
            continue
        is_padded = paddings is not None and np.shape(paddings) == np.shape(x)
        counts = np.asarray(paddings) < 0.5 if is_padded else None
        token_ids(x, f"predict: {name}", size, ndim=np.ndim(x), counts=counts)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
