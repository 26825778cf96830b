"""A model beside a frozen copy of itself, for losses that compare both."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.layers.whole_model.adapters import adapted_layers, without_adapters

REFERENCE = "reference"


def with_reference(
    *args: Any, base_tpl: Callable[..., Any], rngs: nnx.Rngs, **kwargs: Any
) -> Any:
    """Returns the model that `base_tpl` makes of the other arguments, with a copy as `reference`.

    The copy starts with the same weights; leave it out of training:
    `learner.bprop_variable_exclusion="reference/.*"`. A model with adapters needs none.
    """
    same_rngs = nnx.compat.clone(rngs)
    module = base_tpl(*args, rngs=rngs, **kwargs)
    setattr(module, REFERENCE, base_tpl(*args, rngs=same_rngs, **kwargs))
    return module


def reference_of(module: nnx.Module) -> nnx.Module:
    """Returns the model that `module` began as: its copy, or itself without its adapters.

    Raises:
      ConfigError: it has neither.
    """
    if hasattr(module, REFERENCE):
        return getattr(module, REFERENCE)
    if not adapted_layers(module):
        raise ConfigError(
            f"{type(module).__name__} has neither adapters nor a frozen copy of itself. Give it "
            "adapters (praxis_lite.layers.lora), or make it with "
            "fdl.Partial(with_reference, base_tpl=...) of praxis_lite.layers."
        )
    return without_adapters(module)
