"""Weights from an Orbax checkpoint of `nnx.state(model)`, as Flax's guide saves one.

A job begins with them by `run.init_from_checkpoint_rules`, which takes such a folder too.
"""

from pathlib import Path

import numpy as np

from praxis_lite.checkpoints.init.nnx_checkpoints import NnxCheckpoint
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.models import NnxModel
from praxis_lite.models.model import MdlVars, spec_leaves
from praxis_lite.models.nnx_variables import collection, leaves_of, path_text


def mdl_vars_from_nnx(model: NnxModel, directory: str | Path) -> MdlVars:
    """Returns `{"params": ..., "non_trainable": ...}` of NumPy arrays at their true shapes.

    The state of random streams (`nnx.Dropout`'s) is left out: no job keeps it.

    Args:
      model: whose variables are wanted.
      directory: what was given to `ocp.StandardCheckpointer().save`, of `nnx.state(model)` or
        `nnx.to_pure_dict(nnx.state(model))`.

    Raises:
      ConfigError: it is no such checkpoint, or damaged; variables are left over or missing, or
        have another shape or dtype. Lists them.
    """
    saved = NnxCheckpoint(Path(directory))
    errors, unused = [], set(saved.arrays.values())
    mdl_vars: MdlVars = {"params": {}, "non_trainable": {}}
    for path, leaf in leaves_of(model.abstract_module()):
        if collection(leaf) is None:
            unused.discard(saved.arrays.get(path_text(path)))
    for path, spec in spec_leaves(model.weight_specs()):
        first, name = path.split("/", 1)
        array = saved.arrays.get(name)
        if array is None:
            errors.append(f"{name} is missing.{did_you_mean(name, saved.arrays)}")
            continue
        unused.discard(array)
        found = f"{array.dtype}{list(array.shape)}"
        wanted = f"{np.dtype(spec.dtype)}{list(spec.shape)}"
        if found != wanted:
            errors.append(f"{name} is {found} there, {wanted} in the model.")
            continue
        node, (*parents, last) = mdl_vars[first], name.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    errors += [f"{array.path} is left over." for array in sorted(unused, key=lambda x: x.path)]
    if errors:
        more = f" And {len(errors) - 5} more." if len(errors) > 5 else ""
        raise ConfigError(
            f"{saved.directory} does not fit the model: {' '.join(errors[:5])}{more} Build the "
            "model as the one that was saved."
        )
    return _read(mdl_vars)


def _read(tree: dict) -> dict:
    return {name: _read(x) if isinstance(x, dict) else x.read() for name, x in tree.items()}
