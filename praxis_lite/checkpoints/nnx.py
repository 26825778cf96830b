"""Reads weights from an Orbax checkpoint of `nnx.state(model)`, as in Flax's checkpointing guide.

To start a job from such weights, set the folder in `run.init_from_checkpoint_rules`.
"""

import warnings
from pathlib import Path

import numpy as np
from flax.traverse_util import unflatten_dict

from praxis_lite.checkpoints.init.nnx_checkpoint import NnxCheckpoint
from praxis_lite.core.errors import ConfigError, did_you_mean, first_few
from praxis_lite.core.models.model import MdlVars, spec_leaves
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.models.nnx_variables import collection, leaves_of, path_text

__all__ = ["mdl_vars_from_nnx"]


def mdl_vars_from_nnx(
    model: NnxModel, directory: str | Path, *, step: int | None = None
) -> MdlVars:
    """Reads the variables of a model from an Orbax checkpoint.

    The state of random streams, such as in `nnx.Dropout`, is ignored. Scalars and strings that are
    not in the model, such as a step, are ignored with a warning.

    Args:
      model: The model whose variables are read.
      directory: The folder to which Orbax saved `nnx.state(model)` or
        `nnx.to_pure_dict(nnx.state(model))` with StandardCheckpointer or `checkpoint.v1`, or the
        folder with the steps of a `training.Checkpointer` or a CheckpointManager.
      step: The step to read, or None for the latest step.

    Returns:
      `{"params": ..., "non_trainable": ...}`, nested dicts of NumPy arrays without padding.

    Raises:
      ConfigError: The checkpoint does not exist, is damaged, or contains several trees of arrays;
        or the names, shapes or dtypes of its variables do not match the model.
    """
    saved = NnxCheckpoint(directory)
    arrays = saved.arrays(step)
    # `unused` is reduced to the arrays in the checkpoint that the model does not have.
    errors, unused, actual = [], set(arrays.values()), {}
    # Random streams and recorded values belong to no collection. They may be in the checkpoint.
    for keys, leaf in leaves_of(model.abstract_module()):
        if collection(leaf) is None:
            unused.discard(arrays.get(path_text(keys)))
    for path, spec in spec_leaves(model.weight_specs()):
        name = path.split("/", 1)[1]
        array = arrays.get(name)
        if array is None:
            errors.append(f"{name} is missing.{did_you_mean(name, arrays)}")
            continue
        unused.discard(array)
        actual[path] = array
        saved_as = f"{array.dtype}{list(array.shape)}"
        expected = f"{np.dtype(spec.dtype)}{list(spec.shape)}"
        if saved_as != expected:
            errors.append(f"{name} is {saved_as} in the checkpoint, but {expected} in the model.")
    # Scalars, such as a step, only cause the warning below.
    left_over = sorted(array.path.removesuffix("/value") for array in unused if array.shape)
    errors += [f"{path} is only in the checkpoint." for path in left_over]
    if errors:
        raise ConfigError(
            f"{saved.directory} does not match the model: {first_few(errors, 5, ' ')} Build the "
            "model with the settings of the saved model."
        )
    left_out = [array.path for array in unused] + saved.strings(step)
    if left_out:
        warnings.warn(
            f"{saved.directory}: ignored values that are not in the model: "
            f"{first_few(sorted(left_out), 8)}",
            stacklevel=2,
        )
    numpy_arrays = {path: array.read() for path, array in actual.items()}
    return {"params": {}, "non_trainable": {}, **unflatten_dict(numpy_arrays, sep="/")}
