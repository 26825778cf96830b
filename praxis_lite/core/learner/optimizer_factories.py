"""Validates optimizer factories and learning rates; builds optimizers and calls their updates."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.user_lines import user_line

__all__ = ("updates_of",)

PyTree = Any
Schedule = Callable[[jax.Array], jax.Array]
OptimizerFactory = Callable[..., optax.GradientTransformation]
# With larger rates, a model cannot learn unless its loss is scaled to below 1e-6.
MAX_LEARNING_RATE = 1e6


def build_optimizer(
    optimizer: OptimizerFactory, learning_rate: float | Schedule, owner: str
) -> optax.GradientTransformation:
    """Calls an optimizer factory with a learning rate and returns the optax transformation.

    Args:
      optimizer: Takes `learning_rate` and returns an optax transformation.
      learning_rate: A number or a schedule.
      owner: Name of the class with this setting, for messages.

    Raises:
      ConfigError: The factory does not accept a learning rate, requires more arguments, or does not
        return an optax transformation.
    """
    setting, example = f"{owner}.optimizer", "fdl.Partial(optax.adamw, b2=0.98)"
    if isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"{setting} is an optimizer that is already built; expected a function that builds it. "
            f"Write {example} instead of optax.adamw(1e-3, b2=0.98), and set "
            f"{owner}.learning_rate=1e-3. Instead of an optax.chain, pass a function of "
            "learning_rate that returns the chain."
        )
    expected = "a function that builds an optimizer"
    require(callable(optimizer), setting, optimizer, f"{expected}, such as {example}")
    name = function_name(optimizer)
    try:
        inspect.signature(optimizer).bind(learning_rate=learning_rate)
    except TypeError as error:
        change = "Use a different optimizer, or wrap this one in a function"
        missing = re.search(r"missing a required .*argument: '(\w+)'", str(error))
        if missing:
            change = f"Set it in the config: fdl.Partial({_last(name)}, {missing[1]}=...)"
        raise ConfigError(
            f"{setting}: {name} cannot be called with only learning_rate: {error}. {change}."
        ) from None
    except ValueError:  # Some functions written in C have no signature.
        pass
    transformation = optimizer(learning_rate=learning_rate)
    if not isinstance(transformation, optax.GradientTransformation):
        raise ConfigError(
            f"{setting}: {name} returns a {type(transformation).__name__}; expected an "
            "optax.GradientTransformation."
        )
    return transformation


def checked_rate(setting: str, learning_rate: float | Schedule) -> float | Schedule:
    """Checks that a learning rate is a schedule or a plausible number, and returns it.

    Raises:
      ConfigError: The rate is a number that is negative, not finite or above MAX_LEARNING_RATE; a
        schedule that does not return a scalar; or neither a number nor a schedule. The message
        names `setting`.
    """
    if isinstance(learning_rate, int | float):
        require(
            0 <= learning_rate <= MAX_LEARNING_RATE,
            setting,
            learning_rate,
            f"a number from 0 to {MAX_LEARNING_RATE:g}, such as 1e-3",
            "A negative rate would increase the loss."
            if learning_rate < 0
            else "A model cannot learn at this rate.",
        )
    elif not isinstance(learning_rate, jax.Array | np.number):
        expected = "a number, or a schedule (a function of the number of updates)"
        require(callable(learning_rate), setting, learning_rate, expected)
        _check_schedule(setting, learning_rate, expected)
    return learning_rate


def _check_schedule(setting: str, schedule: Schedule, expected: str) -> None:
    try:
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
        actual = f"returns {rate}"
    except TypeError as error:
        if user_line(error) is not None:
            raise
        rate, actual = None, f"fails: {error}"
    if getattr(rate, "shape", None) != ():
        name = _last(function_name(schedule))
        raise ConfigError(
            f"{setting}: expected {expected}, but {name} {actual} when it is called with a number. "
            f"If {name} returns a schedule, use fdl.Config({name}, ...), so that it is called when "
            "the config is built."
        )


def rate_at(learning_rate: float | Schedule, num_updates: jax.Array) -> jax.Array:
    """Returns the float32 learning rate for the update that follows `num_updates` updates."""
    rate = learning_rate(num_updates) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def updates_of(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    slots: PyTree,
    weights: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns an optimizer's updates and new slots; passes the loss if `update` accepts it."""
    extra = {"value": loss} if takes_loss(optimizer) else {}
    updates, new_slots = optimizer.update(grads, slots, weights, **extra)
    return updates, new_slots


def takes_loss(optimizer: optax.GradientTransformation) -> bool:
    """Returns whether an optimizer's update accepts `value`, the loss."""
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return False
    parameters = inspect.signature(optimizer.update).parameters.values()
    return any(item.name == "value" or item.kind is item.VAR_KEYWORD for item in parameters)
