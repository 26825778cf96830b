"""Activation functions, keyed by name as in Pax."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, did_you_mean

ActivationFn = Callable[[jax.Array], jax.Array]

# Names are Pax's class names in lower case, with underscores for readability. "gelu_exact" is Pax's
# GELU(approximate=False).
ACTIVATIONS: dict[str, ActivationFn] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "cubed_relu": lambda x: jax.nn.relu(x) ** 3,
    "sine_relu": lambda x: jnp.sin(jax.nn.relu(x)),
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, negative_slope=0.01),
    "elu": jax.nn.elu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "exp": jnp.exp,
    "identity": lambda x: x,
}


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


_BY_FOLDED_NAME = {_folded(name): function for name, function in ACTIVATIONS.items()}


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """Limits logits to +-cap with a tanh; if the cap is 0, returns them unchanged."""
    return cap * jnp.tanh(logits / cap) if cap > 0.0 else logits


def activation_fn(activation: str | ActivationFn, layer: object) -> ActivationFn:
    """Returns the activation function for a layer's setting.

    Args:
      activation: A name in ACTIVATIONS, ignoring case and underscores, as in Pax ("SquaredReLU"),
        or a function of an array, such as a leaky ReLU with a custom slope.
      layer: The layer that has this setting, for error messages.

    Raises:
      ConfigError: The name is unknown. The message lists the names.
    """
    if callable(activation):
        return activation
    function = _BY_FOLDED_NAME.get(_folded(str(activation)))
    if function is None:
        raise ConfigError(
            f"{type(layer).__name__}.activation is {activation!r}; expected a function or one of "
            f"{', '.join(ACTIVATIONS)}.{did_you_mean(str(activation), ACTIVATIONS)}"
        )
    return function
