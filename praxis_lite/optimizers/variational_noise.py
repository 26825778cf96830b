"""Variational noise: adds noise to weights that match a regex while gradients are computed."""

import dataclasses
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, first_few, require
from praxis_lite.core.learner.path_masks import compiled_patterns
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of

PyTree = Any


@dataclasses.dataclass(frozen=True)
class VariationalNoise:
    """Gaussian noise that is added to weights while gradients are computed.

    Updates are applied to the weights without noise. See Graves 2011, "Practical variational
    inference for neural networks". Corresponds to Pax's `task.train.variational_noise`, whose
    patterns start with `params/`.

    Attributes:
      scale: Standard deviation of the noise.
      regex: Regular expression for the paths of weights to add noise to, matched from the start
        (`re.match`), such as "lm/embedding" or ".*ff_layer".
      start_step: First step with noise.

    Raises:
      ConfigError: A setting is out of range, or `regex` is not a valid regular expression.
    """

    scale: float
    regex: str
    start_step: int = 0

    def __post_init__(self):
        require(
            self.scale > 0,
            "VariationalNoise.scale",
            self.scale,
            "a positive standard deviation",
            "For no noise, set variational_noise=None.",
        )
        step = self.start_step
        require(step >= 0, "VariationalNoise.start_step", step, "a non-negative step")
        compiled_patterns("VariationalNoise.regex", (self.regex,))

    def check(self, weights: PyTree) -> None:
        """Raises ConfigError if the regex matches no weight in the nested dict `weights`."""
        paths = [path for path, _ in leaves_with_path(weights)]
        if any(self._matches(path) for path in paths):
            return
        hint = " Omit params/." if self.regex.startswith("params/") else ""
        raise ConfigError(
            f"VariationalNoise.regex {self.regex!r} matches none of the trained weights "
            f"({first_few(paths, 5)}). It must match the start of a path.{hint} Fix the regex, or "
            "remove the noise."
        )

    def apply(self, params: PyTree, key: jax.Array, step: jax.Array) -> PyTree:
        """Adds noise to matching weights, from step `start_step` on.

        The noise for a weight depends only on the key and on the weight's path and logical shape,
        but not on the mesh or on other weights.

        Args:
          params: Nested dict of the trained weights; see `check`.
          key: Key of this step. It may also be used for other random draws.
          step: Int32 scalar.
        """
        self.check(params)
        scale = jnp.where(step >= self.start_step, jnp.float32(self.scale), 0.0)

        def with_noise(path: tuple, weight: jax.Array) -> jax.Array:
            name = path_of(path)
            if not self._matches(name):
                return weight
            # Differs from the keys for dropout and other draws, for which small numbers are folded
            # in.
            weight_key = jax.random.fold_in(key, zlib.crc32(f"variational_noise/{name}".encode()))
            noise = scale * jax.random.normal(weight_key, weight.shape)
            return weight + noise.astype(weight.dtype)

        return jax.tree.map_with_path(with_noise, params)

    def _matches(self, path: str) -> bool:
        return re.match(self.regex, path) is not None
