"""Settings in an experiment's config: found, and changed to what must compute the same."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
from fiddle import daglish

LOW_PRECISION = {np.dtype(jnp.bfloat16), np.dtype(jnp.float16)}


def unrolled(config: "fdl.Config") -> "fdl.Config | None":
    """Returns a config whose scanned stacks are in a row, and the other way; None: it has none.

    What a layer makes by default, such as `stacked_transformer_tpl=Repeat`, is reached too.
    """
    config, has_stack = copy.deepcopy(config), False
    for buildable in list(buildables(config.task)):
        for name, value in settings_of(buildable).items():
            if callable(value) and not isinstance(value, fdl.Buildable) and _is_stack(value):
                setattr(buildable, name, fdl.Partial(value))
    for buildable in buildables(config.task):
        if _is_stack(fdl.get_callable(buildable)):
            buildable.unroll = not settings_of(buildable)["unroll"]
            has_stack = True
    return config if has_stack else None


def _is_stack(function: Callable[..., Any]) -> bool:
    return {"unroll", "checkpoint_policy"} <= set(parameters_of(function))


def low_precision_settings(config: "fdl.Config") -> list[str]:
    """Returns the paths of the settings, defaults among them, that are bfloat16 or float16."""
    return [
        f"{daglish.path_str(path)}.{name}".lstrip(".")
        for value, path in daglish.iterate(config.task) if isinstance(value, fdl.Buildable)
        for name, item in settings_of(value).items()
        # JAX's `jnp.bfloat16` is neither a dtype nor a NumPy type.
        if isinstance(item, np.dtype | type(jnp.bfloat16)) and jnp.dtype(item) in LOW_PRECISION
    ]


def buildables(config: Any) -> Iterator[fdl.Buildable]:
    """Yields each Config and Partial in a config."""
    seen = []
    for value, _ in daglish.iterate(config):
        if isinstance(value, fdl.Buildable) and not any(value is item for item in seen):
            seen.append(value)
            yield value


def settings_of(buildable: fdl.Buildable) -> dict[str, Any]:
    """Returns the settings of a Config, set or by default."""
    parameters = parameters_of(fdl.get_callable(buildable))
    return {
        name: getattr(buildable, name) for name, item in parameters.items()
        if item.default is not inspect.Parameter.empty or name in fdl.ordered_arguments(buildable)
    }


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a function's parameters that have names, by them; none if it does not say them."""
    try:
        result = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: item for name, item in result.items()
        if item.kind not in (*variadic, inspect.Parameter.POSITIONAL_ONLY)
    }
