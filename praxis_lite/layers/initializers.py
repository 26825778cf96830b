"""Weight initializers, with the methods, fan-in, fan-out and distributions of Pax's WeightInit."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require_choice

Draw = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def _gaussian(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, minval=-1.0, maxval=1.0)


def _truncated_gaussian(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # The truncated normal is not rescaled, so its standard deviation is 0.8796.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)


def _constant(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.ones(shape, dtype)


def _delta_orthogonal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros with an orthogonal matrix in the middle of the window (arXiv:1806.05393)."""
    if len(shape) < 2:
        return _gaussian(key, shape, dtype)
    gain = max(math.sqrt(shape[-2] / shape[-1]), 1.0)
    matrix = jax.nn.initializers.orthogonal(gain, column_axis=-1)(key, shape[-2:], dtype)
    middle = tuple((size - 1) // 2 for size in shape[:-2])
    return jnp.zeros(shape, dtype).at[middle].set(matrix)


# The distribution, and the name of an additional scale factor (see `_FACTORS`).
_METHODS: dict[str, tuple[Draw, str]] = {
    "gaussian": (_gaussian, "one"),
    "gaussian_sqrt_dim": (_gaussian, "dim"),
    "gaussian_sqrt_fanin": (_gaussian, "fan_in"),
    "gaussian_sqrt_fanout": (_gaussian, "fan_out"),
    "gaussian_sqrt_fanavg": (_gaussian, "fan_avg"),
    "truncated_gaussian": (_truncated_gaussian, "one"),
    "truncated_gaussian_sqrt_dim": (_truncated_gaussian, "dim"),
    "truncated_gaussian_sqrt_fanin": (_truncated_gaussian, "fan_in"),
    "truncated_gaussian_sqrt_fanout": (_truncated_gaussian, "fan_out"),
    "uniform": (_uniform, "one"),
    "uniform_sqrt_dim": (_uniform, "dim"),
    "uniform_sqrt_fanavg": (_uniform, "three_fan_avg"),
    "uniform_unit_scaling": (_uniform, "unit"),
    "xavier": (_uniform, "three_fan_avg"),
    "constant": (_constant, "one"),
    "delta_orthogonal": (_delta_orthogonal, "one"),
}


def fans(
    shape: Sequence[int],
    fan_in_axes: Sequence[int] | None = None,
    fan_out_axes: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Returns (fan-in, fan-out): the number of inputs per output, and of outputs per input.

    The last two dims are inputs and outputs. Other dims, such as a convolution's window, multiply
    both. For a vector, both are its size. If axes are passed, fan-in and fan-out are the products
    of these dims.

    Raises:
      ConfigError: Only one of fan_in_axes and fan_out_axes is set.
    """
    if (fan_in_axes is None) != (fan_out_axes is None):
        raise ConfigError(
            f"fan_in_axes is {fan_in_axes} and fan_out_axes is {fan_out_axes}. Set both or neither."
        )
    if len(shape) < 2:
        return math.prod(shape), math.prod(shape)
    if fan_in_axes is not None:
        assert fan_out_axes is not None, "Both or neither must be set."
        fan_in = math.prod(shape[axis] for axis in fan_in_axes)
        return fan_in, math.prod(shape[axis] for axis in fan_out_axes)
    window = math.prod(shape[:-2])
    return window * shape[-2], window * shape[-1]


@dataclasses.dataclass(frozen=True)
class WeightInit:
    """An initializer: a function of (key, shape, dtype) that returns a weight.

    `WeightInit("gaussian", 0.02)` is equivalent to `WeightInit.Gaussian(0.02)`. In an experiment,
    write `weight_init=fdl.Config(WeightInit.Gaussian, scale=0.02)`.

    Attributes:
      method: Pax's name, such as "gaussian_sqrt_fanin"; see the static methods.
      scale: Factor that multiplies the random numbers.
      fan_in_axes: Dims whose product is the fan-in; see `fans`.
      fan_out_axes: Dims whose product is the fan-out.

    Raises:
      ConfigError: The method is unknown, or only one of fan_in_axes and fan_out_axes is set.
    """

    method: str
    scale: float = 1.0
    fan_in_axes: tuple[int, ...] | None = None
    fan_out_axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_choice("WeightInit.method", self.method, _METHODS)
        fans((1, 1), self.fan_in_axes and (0,), self.fan_out_axes and (1,))

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        draw, factor = _METHODS[self.method]
        shape = tuple(shape)
        scale = self.scale
        if self.method == "delta_orthogonal" and len(shape) > 1:
            scale = 1.0  # As in Pax, where the matrix already includes a scale.
        scale *= _FACTORS[factor](shape, *fans(shape, self.fan_in_axes, self.fan_out_axes))
        return jnp.asarray(scale, dtype) * draw(key, shape, dtype)

    @staticmethod
    def Gaussian(scale: float = 1.0) -> "WeightInit":
        """Normal with standard deviation `scale`."""
        return WeightInit("gaussian", scale)

    @staticmethod
    def GaussianSqrtDim(scale: float = 1.0) -> "WeightInit":
        """Normal with standard deviation scale / sqrt(dim 0)."""
        return WeightInit("gaussian_sqrt_dim", scale)

    @staticmethod
    def GaussianSqrtFanIn(scale: float = 1.0) -> "WeightInit":
        """Normal with standard deviation scale / sqrt(fan_in)."""
        return WeightInit("gaussian_sqrt_fanin", scale)

    @staticmethod
    def GaussianSqrtFanOut(scale: float = 1.0) -> "WeightInit":
        """Normal with standard deviation scale / sqrt(fan_out)."""
        return WeightInit("gaussian_sqrt_fanout", scale)

    @staticmethod
    def GaussianSqrtFanAvg(scale: float = 1.0) -> "WeightInit":
        """Normal with standard deviation scale * sqrt(2 / (fan_in + fan_out))."""
        return WeightInit("gaussian_sqrt_fanavg", scale)

    @staticmethod
    def TruncatedGaussian(scale: float = 1.0) -> "WeightInit":
        """A normal truncated at +-2, multiplied by `scale`."""
        return WeightInit("truncated_gaussian", scale)

    @staticmethod
    def TruncatedGaussianSqrtDim(scale: float = 1.0) -> "WeightInit":
        """A normal truncated at +-2, multiplied by scale / sqrt(dim 0)."""
        return WeightInit("truncated_gaussian_sqrt_dim", scale)

    @staticmethod
    def TruncatedGaussianSqrtFanIn(scale: float = 1.0) -> "WeightInit":
        """A normal truncated at +-2, multiplied by scale / sqrt(fan_in)."""
        return WeightInit("truncated_gaussian_sqrt_fanin", scale)

    @staticmethod
    def TruncatedGaussianSqrtFanOut(scale: float = 1.0) -> "WeightInit":
        """A normal truncated at +-2, multiplied by scale / sqrt(fan_out)."""
        return WeightInit("truncated_gaussian_sqrt_fanout", scale)

    @staticmethod
    def Uniform(scale: float = 1.0) -> "WeightInit":
        """Uniform within +-scale."""
        return WeightInit("uniform", scale)

    @staticmethod
    def UniformSqrtDim(scale: float = 1.0) -> "WeightInit":
        """Uniform within +-scale / sqrt(dim 0)."""
        return WeightInit("uniform_sqrt_dim", scale)

    @staticmethod
    def UniformSqrtFanAvg(scale: float = 1.0) -> "WeightInit":
        """Uniform within +-scale * sqrt(6 / (fan_in + fan_out))."""
        return WeightInit("uniform_sqrt_fanavg", scale)

    @staticmethod
    def UniformUnitScaling(scale: float = 1.0) -> "WeightInit":
        """Uniform within +-scale * sqrt(3 / product of all dims except the last)."""
        return WeightInit("uniform_unit_scaling", scale)

    @staticmethod
    def Xavier(scale: float = 1.0) -> "WeightInit":
        """Uniform within +-scale * sqrt(6 / (fan_in + fan_out)); Pax's default, with scale 1."""
        return WeightInit("xavier", scale)

    @staticmethod
    def XavierWithFixupParams(
        scale: float = 1.0, depth: float = 1.0, layers_per_residual_block: float = 1.0
    ) -> "WeightInit":
        """Xavier scaled by depth ** (-1 / (2 layers_per_residual_block)) (arXiv:1901.09321)."""
        return WeightInit("xavier", scale * depth ** (-0.5 / layers_per_residual_block))

    @staticmethod
    def Constant(scale: float = 1.0) -> "WeightInit":
        """`scale` in all elements."""
        return WeightInit("constant", scale)

    @staticmethod
    def ScaledDeltaOrthogonal(scale: float = 1.0) -> "WeightInit":
        """Orthogonal matrix in the middle of the window, zeros elsewhere; Gaussian for a vector."""
        return WeightInit("delta_orthogonal", scale)


@dataclasses.dataclass(frozen=True)
class EinsumXavier:
    """Xavier's uniform initializer with the fan-in and fan-out of the einsum that uses the weight.

    `BaseLayer.weight` and `Dense.make` call `for_dims` with the weight's dims.
    """

    def for_dims(self, input_dims: Sequence[int], output_dims: Sequence[int]) -> Draw:
        """Returns the initializer for a weight with these dims.

        Args:
          input_dims: Indices of the weight's input dims.
          output_dims: Indices of the weight's output dims. The remaining dims stack independent
            weights and count towards neither fan-in nor fan-out, as in Pax with explicit fan axes.
        """
        axes = {"in_axis": tuple(input_dims), "out_axis": tuple(output_dims)}

        def initialize(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            fan_dims = {*input_dims, *output_dims}
            others = tuple(dim for dim in range(len(shape)) if dim not in fan_dims)
            init = jax.nn.initializers.variance_scaling(
                1.0, "fan_avg", "uniform", batch_axis=others, **axes
            )
            return init(key, shape, dtype)

        return initialize


_FACTORS: dict[str, Callable[[tuple[int, ...], int, int], float]] = {
    "one": lambda shape, fan_in, fan_out: 1.0,
    "dim": lambda shape, fan_in, fan_out: math.prod(shape[:1]) ** -0.5,
    "fan_in": lambda shape, fan_in, fan_out: fan_in**-0.5,
    "fan_out": lambda shape, fan_in, fan_out: fan_out**-0.5,
    "fan_avg": lambda shape, fan_in, fan_out: math.sqrt(2.0 / (fan_in + fan_out)),
    "three_fan_avg": lambda shape, fan_in, fan_out: math.sqrt(6.0 / (fan_in + fan_out)),
    "unit": lambda shape, fan_in, fan_out: math.sqrt(3.0 / math.prod(shape[:-1])),
}
