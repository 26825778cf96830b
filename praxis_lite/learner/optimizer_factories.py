"""An optimizer is made by calling its factory with a learning rate, and both are checked."""

import inspect
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.config.paths import callable_name
from praxis_lite.config.user_lines import user_line
from praxis_lite.errors import ConfigError

Schedule = Callable[[jax.Array], jax.Array]
OptimizerFactory = Callable[..., optax.GradientTransformation]


def made(
    optimizer: OptimizerFactory, learning_rate: float | Schedule, owner: str
) -> optax.GradientTransformation:
    """Returns the transformation that an optimizer makes with a learning rate.

    Raises:
      ConfigError: it is no function of a learning rate, lacks another argument, or makes something
        else; or the rate is neither a number nor a schedule. Names the owner.
    """
    setting, example = f"{owner}.optimizer", "fdl.Partial(optax.adamw, b2=0.98)"
    _check_rate(learning_rate, f"{owner}.learning_rate")
    if isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"{setting} is an optimizer that is built already; wanted is what builds it, for it is "
            f"called with learning_rate. Write {example} in place of optax.adamw(1e-3, b2=0.98), "
            f"and give the rate as {owner}.learning_rate."
        )
    if not callable(optimizer):
        raise ConfigError(
            f"{setting} is {optimizer!r}; wanted is a function that builds an optimizer, such as "
            f"{example}."
        )
    name = callable_name(getattr(optimizer, "func", optimizer))
    try:
        inspect.signature(optimizer).bind(learning_rate=learning_rate)
    except TypeError as error:
        mend = "Take another, or a function of yours that calls it"
        lacking = re.search(r"missing a required .*argument: '(\w+)'", str(error))
        if lacking:
            mend = f"Give it in the config: fdl.Partial({_last(name)}, {lacking[1]}=...)"
        raise ConfigError(
            f"{setting}: {name} cannot be called with just learning_rate: {error}. {mend}."
        ) from None
    except ValueError:  # Some that are written in C have no signature.
        pass
    transformation = optimizer(learning_rate=learning_rate)
    if not isinstance(transformation, optax.GradientTransformation):
        raise ConfigError(
            f"{setting}: {name} returns a {type(transformation).__name__}; wanted is an "
            "optax.GradientTransformation."
        )
    return transformation


def _check_rate(learning_rate: float | Schedule, setting: str) -> None:
    if isinstance(learning_rate, int | float | jax.Array | np.number):
        return
    wanted = "wanted is a number, or a schedule: a function of the number of updates made"
    if not callable(learning_rate):
        raise ConfigError(f"{setting} is {learning_rate!r}; {wanted}.")
    try:
        rate = jax.eval_shape(learning_rate, jax.ShapeDtypeStruct((), jnp.int32))
        found = f"returns {rate}"
    except TypeError as error:
        if user_line(error) is not None:
            raise
        rate, found = None, str(error)
    if getattr(rate, "shape", None) != ():
        name = callable_name(getattr(learning_rate, "func", learning_rate))
        raise ConfigError(
            f"{setting}: {_last(name)}, called with the number of updates: {found}; {wanted}. "
            f"Configure a schedule as fdl.Config({_last(name)}, ...), for it is built before it is "
            "called."
        )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
