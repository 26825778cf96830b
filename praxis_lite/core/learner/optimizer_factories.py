"""Calls an optimizer's factory with a learning rate, and checks both."""

import inspect
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.user_lines import user_line

Schedule = Callable[[jax.Array], jax.Array]
OptimizerFactory = Callable[..., optax.GradientTransformation]
# At a larger rate nothing is learnt, unless the loss is scaled to below 1e-6.
MAX_LEARNING_RATE = 1e6


def made(
    optimizer: OptimizerFactory, learning_rate: float | Schedule, owner: str
) -> optax.GradientTransformation:
    """Returns the transformation that an optimizer's factory makes with a learning rate.

    Raises:
      ConfigError: it is not a function of a learning rate, lacks another argument, or makes
        something else; names the owner.
    """
    setting, example = f"{owner}.optimizer", "fdl.Partial(optax.adamw, b2=0.98)"
    if isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"{setting} is an optimizer that is built already. It has to be a function that builds "
            f"one. Write {example} in place of optax.adamw(1e-3, b2=0.98), and give the rate as "
            f"{owner}.learning_rate."
        )
    expected = "a function that builds an optimizer"
    require(callable(optimizer), setting, optimizer, f"{expected}, such as {example}")
    name = function_name(optimizer)
    try:
        inspect.signature(optimizer).bind(learning_rate=learning_rate)
    except TypeError as error:
        change = "Take another, or a function of yours that calls it"
        lacking = re.search(r"missing a required .*argument: '(\w+)'", str(error))
        if lacking:
            change = f"Give it in the config: fdl.Partial({_last(name)}, {lacking[1]}=...)"
        raise ConfigError(
            f"{setting}: {name} cannot be called with just learning_rate: {error}. {change}."
        ) from None
    except ValueError:  # Some that are written in C have no signature.
        pass
    transformation = optimizer(learning_rate=learning_rate)
    if not isinstance(transformation, optax.GradientTransformation):
        raise ConfigError(
            f"{setting}: {name} returns a {type(transformation).__name__}, which is not an "
            "optax.GradientTransformation."
        )
    return transformation


def checked_rate(setting: str, learning_rate: float | Schedule) -> float | Schedule:
    """Returns the rate if it is a schedule, or a number of a plausible size.

    Raises:
      ConfigError: a number is not finite or above MAX_LEARNING_RATE, a schedule does not return a
        scalar, or it is neither; names `setting`.
    """
    if isinstance(learning_rate, int | float):
        require(
            0 <= learning_rate <= MAX_LEARNING_RATE, setting, learning_rate,
            f"a number from 0 to {MAX_LEARNING_RATE:g}, such as 1e-3",
            "At this one the loss would grow." if learning_rate < 0 else
            "A model learns nothing at this one.",
        )
    elif not isinstance(learning_rate, jax.Array | np.number):
        expected = "a number, or a schedule: a function of the number of updates made"
        require(callable(learning_rate), setting, learning_rate, expected)
        _check_schedule(setting, learning_rate, expected)
    return learning_rate


def _check_schedule(setting: str, schedule: Schedule, wanted: str) -> None:
    try:
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
        actual = f"returns {rate}"
    except TypeError as error:
        if user_line(error) is not None:
            raise
        rate, actual = None, str(error)
    if getattr(rate, "shape", None) != ():
        name = _last(function_name(schedule))
        raise ConfigError(
            f"{setting} has to be {wanted}. {name}, called with that number: {actual}. Configure a "
            f"schedule as fdl.Config({name}, ...): it is built before it is called."
        )


def rate_at(learning_rate: float | Schedule, num_updates: jax.Array) -> jax.Array:
    """Returns the float32 learning rate of the update after `num_updates`."""
    rate = learning_rate(num_updates) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
