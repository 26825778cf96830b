"""Remat switched in a built NNX model: attributes of its layers, known by their names."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.task import Task
from praxis_lite.layers.stacking.checkpoint_policy import CHECKPOINT_POLICIES
from praxis_lite.tools.testing.runs.how_settings import is_of_remat

KEEP_EVERYTHING = "save_everything"


def remat_switched(task: Task) -> Task | None:
    """Returns a task with remat switched off where it was on, and on where it was off.

    An attribute counts if its name is about remat and its value is a bool, or a policy of the
    library. Returns None if no layer has such an attribute, or the model is not of NNX.
    """
    module = task.model.abstract_module()
    if not isinstance(task.model, NnxModel) or module is None:
        return None
    if not any(_switched_attributes(layer) for _, layer in nnx.compat.iter_modules(module)):
        return None
    task = copy.copy(task)
    task.model = NnxModel(_Switched(task.model.build))
    return task


@dataclasses.dataclass(frozen=True)
class _Switched:
    """Builds the modules of `build`, remat switched."""

    build: Callable[..., nnx.Module]

    def __call__(self, **rngs: Any) -> nnx.Module:
        module = self.build(**rngs)
        for _, layer in nnx.compat.iter_modules(module):
            for name, value in _switched_attributes(layer).items():
                setattr(layer, name, value)
        return module


def _switched_attributes(layer: nnx.Module) -> dict[str, Any]:
    """Returns new values of a layer's attributes, of its class or of an object of settings."""
    result = {}
    of_class = filter(is_of_remat, dir(type(layer)))
    for name in {*vars(layer), *of_class}:
        if isinstance(inspect.getattr_static(type(layer), name, None), property):
            continue
        value = getattr(layer, name)
        new = _switched(name, value)
        if new is not value:
            result[name] = new
    if getattr(layer, "split_backward", False) and result:
        result["split_backward"] = False  # It computes all again, whatever the policy.
    return result


def _switched(name: str, value: Any) -> Any:
    """Returns the other value of an attribute, or the same object if there is none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nnx.Module):
        fields = {x.name: getattr(value, x.name) for x in dataclasses.fields(value) if x.init}
        new = {key: _switched(key, x) for key, x in fields.items()}
        changed = {key: x for key, x in new.items() if x is not fields[key]}
        return dataclasses.replace(value, **changed) if changed else value
    if not is_of_remat(name):
        return value
    if isinstance(value, bool):
        return not value
    is_places = isinstance(value, tuple) and all(isinstance(x, tuple) for x in value)
    if is_places or (isinstance(value, str) and value in CHECKPOINT_POLICIES):
        return "save_nothing" if value == KEEP_EVERYTHING else KEEP_EVERYTHING
    return value
