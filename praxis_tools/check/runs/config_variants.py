"""Finds settings in an experiment's config, and creates configs that must have equal results."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
from fiddle import daglish

LOW_PRECISION = {np.dtype(jnp.bfloat16), np.dtype(jnp.float16)}


def toggle_unroll(config: "fdl.Config") -> "fdl.Config | None":
    """Returns a config in which scanned stacks are unrolled and unrolled stacks are scanned.

    This includes stacks that a layer builds by default, such as `stacked_transformer_tpl=Repeat`.
    Returns None if the config has no stacks.
    """
    config, has_stack = copy.deepcopy(config), False
    # A stack that is a class instead of a config has no settings to change, so wrap it in a config.
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
    """Returns the paths of settings (including defaults) whose value is bfloat16 or float16."""
    return [
        f"{daglish.path_str(path)}.{name}".lstrip(".")
        for buildable, path in daglish.iterate(config.task)
        if isinstance(buildable, fdl.Buildable)
        for name, value in settings_of(buildable).items()
        # `jnp.bfloat16` is neither a dtype nor a NumPy type.
        if isinstance(value, np.dtype | type(jnp.bfloat16)) and jnp.dtype(value) in LOW_PRECISION
    ]


def buildables(config: Any) -> Iterator[fdl.Buildable]:
    """Yields every Config and Partial in a config once."""
    seen: list[fdl.Buildable] = []
    for value, _ in daglish.iterate(config):
        if isinstance(value, fdl.Buildable) and not any(value is other for other in seen):
            seen.append(value)
            yield value


def settings_of(buildable: fdl.Buildable) -> dict[str, Any]:
    """Returns the settings in a Config, including defaults."""
    parameters = parameters_of(fdl.get_callable(buildable))
    arguments = fdl.ordered_arguments(buildable)
    return {
        name: getattr(buildable, name)
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty or name in arguments
    }


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the keyword parameters of a function, or {} if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (*variadic, inspect.Parameter.POSITIONAL_ONLY)
    }
