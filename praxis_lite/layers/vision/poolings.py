"""Max and mean pooling over windows or over entire dims, with Pax's names and numerics.

Means are computed in float32. The layers have no weights, but accept `rngs`, which every template
receives.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import require, require_choice
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import SplitSetting, splits
from praxis_lite.layers.vision.convolutions import PADDINGS, check_sizes

# B batch, H height (or time), W width, C channels, T time.
POOLING_TYPES = ("MAX", "AVG")


def _lowest(dtype: jnp.dtype) -> float | int:
    """Returns the identity of a maximum: -inf, or the lowest integer of `dtype`."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else int(jnp.iinfo(dtype).min)


def _max_over(x: jax.Array, window: Sequence[int], stride: Sequence[int], padding: str):
    return jax.lax.reduce_window(x, _lowest(x.dtype), jax.lax.max, window, stride, padding)


def _sum_over(x: jax.Array, window: Sequence[int], stride: Sequence[int], padding: str):
    return jax.lax.reduce_window(x.astype(jnp.float32), 0.0, jax.lax.add, window, stride, padding)


def _inverse(counts: jax.Array) -> jax.Array:
    """Returns 1 / counts, or 0 where a count is 0."""
    return jnp.where(counts > 0, 1.0 / jnp.maximum(counts, 1.0), 0.0)


class Pooling(BaseLayer):
    """Computes the maximum or mean of each window: [B, H, W, C] -> [B, H', W', C].

    Args:
      window_shape: Window size along height and width.
      window_stride: Strides along height and width.
      pooling_type: 'MAX' or 'AVG'. A mean covers only the part of the window inside the image.
      padding: 'SAME' (ceil(H / stride) outputs) or 'VALID' (only windows inside the image).
    """

    splits = splits(activation=())

    def __init__(
        self,
        window_shape: Sequence[int],
        window_stride: Sequence[int],
        *,
        pooling_type: str = "MAX",
        padding: str = "SAME",
        rngs: nnx.Rngs | None = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        check_sizes(self, 2, window_shape=window_shape, window_stride=window_stride)
        require_choice("Pooling.pooling_type", pooling_type, POOLING_TYPES)
        require_choice("Pooling.padding", padding, PADDINGS)
        self.window_shape, self.window_stride = tuple(window_shape), tuple(window_stride)
        self.pooling_type, self.padding = pooling_type, padding

    def __call__(
        self, inputs: jax.Array, paddings: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the outputs and their paddings.

        With 'VALID' or a stride, an output is padding (and 0) if its window contains padding.
        Otherwise, the output is padding if the input at the same position is padding. As in Pax,
        means include padding in the sum, so inputs must be zero there.

        Args:
          inputs: Float [B, H, W, C].
          paddings: Float [B, H], 1.0 for padding along the height.
        """
        (height, width), (down, across) = self.window_shape, self.window_stride
        windows = (1, height, width, 1), (1, down, across, 1), self.padding
        rows = (1, height), (1, down), self.padding
        is_true = None if paddings is None else 1.0 - paddings
        if self.pooling_type == "MAX":
            if is_true is not None:
                inputs = jnp.where(is_true[..., None, None] > 0, inputs, _lowest(inputs.dtype))
            outputs = _max_over(inputs, *windows)
        else:
            # Divide by the number of inputs in the window, without the border that 'SAME' adds.
            ones = jnp.ones((1, *inputs.shape[1:3], 1))
            outputs = _sum_over(inputs, *windows) / _sum_over(ones, *windows)
            if is_true is not None:
                # Rescale from the mean over all rows of the window to the mean over rows without
                # padding.
                counts = _sum_over(jnp.ones((1, inputs.shape[1])), *rows)
                outputs *= (counts * _inverse(_sum_over(is_true, *rows)))[..., None, None]
            outputs = outputs.astype(inputs.dtype)
        if paddings is not None:
            if down > 1 or self.padding == "VALID":
                paddings = _max_over(paddings, *rows)
            outputs = jnp.where(paddings[..., None, None] < 1, outputs, 0)
        return constrain(outputs, self.activation_split_dims_mapping), paddings


class GlobalPooling(BaseLayer):
    """Computes the maximum or mean over entire dims.

    Args:
      pooling_dims: Non-negative indices of the dims, such as (1, 2) for H and W in [B, H, W, C].
      pooling_type: 'AVG' or 'MAX'.
      keepdims: Whether to keep the reduced dims with size 1.
    """

    splits = splits(activation=())

    def __init__(
        self,
        pooling_dims: Sequence[int],
        *,
        pooling_type: str = "AVG",
        keepdims: bool = False,
        rngs: nnx.Rngs | None = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_choice("GlobalPooling.pooling_type", pooling_type, POOLING_TYPES)
        is_list = isinstance(pooling_dims, Sequence) and len(pooling_dims) > 0
        require(
            is_list and all(isinstance(dim, int) and dim >= 0 for dim in pooling_dims),
            "GlobalPooling.pooling_dims",
            pooling_dims,
            "a list of non-negative dims, such as (1, 2) for H and W of [B, H, W, C]",
        )
        self.pooling_dims, self.pooling_type = tuple(pooling_dims), pooling_type
        self.keepdims = keepdims

    def __call__(
        self,
        inputs: jax.Array,
        epsilon: float = 1e-8,
        compatible_paddings: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the maximum or mean of the inputs.

        Args:
          inputs: The array to pool.
          epsilon: Added to the number of elements in a mean with paddings.
          compatible_paddings: Float, with the rank of the inputs, 1.0 for elements to ignore.
        """
        dims = {"axis": self.pooling_dims, "keepdims": self.keepdims, "dtype": jnp.float32}
        is_true = None if compatible_paddings is None else compatible_paddings <= 0
        if self.pooling_type == "MAX":
            if is_true is not None:
                inputs = jnp.where(is_true, inputs, _lowest(inputs.dtype))
            outputs = self._max(inputs)
        elif is_true is None or compatible_paddings is None:
            outputs = jnp.mean(inputs, **dims).astype(inputs.dtype)
        else:
            total = jnp.sum(jnp.where(is_true, inputs, 0), **dims)
            count = jnp.sum(1.0 - compatible_paddings, **dims)
            outputs = (total / (count + epsilon)).astype(inputs.dtype)
        return constrain(outputs, self.activation_split_dims_mapping)

    def _max(self, x: jax.Array) -> jax.Array:
        # Avoid jnp.max, whose gradient searches for elements that equal the maximum. XLA may
        # compute the inputs twice, and the results may differ in the last bit. In that case, no
        # element is equal, and the gradient is NaN (jax 0.10 on CPU, without optimization).
        # reduce_window instead passes the gradient to the first maximum.
        is_pooled = [dim in self.pooling_dims for dim in range(x.ndim)]
        window = [size if pooled else 1 for size, pooled in zip(x.shape, is_pooled, strict=True)]
        outputs = _max_over(x, window, (1,) * x.ndim, "VALID")
        return outputs if self.keepdims else jnp.squeeze(outputs, axis=self.pooling_dims)


class Pooling1D(BaseLayer):
    """Computes the maximum or mean of each window along time: [B, T, ...] -> [B, T', ...].

    T' is ceil(T / stride). Windows are symmetric ('SAME').

    Args:
      stride: Distance between windows.
      window: Window size. If 0, the stride. If 1, every stride-th time is selected.
      pooling_type: 'MAX', or 'AVG' for the mean without padding (0 if there is only padding).
    """

    splits = splits(activation=())

    def __init__(
        self,
        stride: int = 1,
        window: int = 0,
        *,
        pooling_type: str = "AVG",
        rngs: nnx.Rngs | None = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, stride=stride)
        if window != 0:
            require_positive(self, window=window)
        require_choice("Pooling1D.pooling_type", pooling_type, POOLING_TYPES)
        self.stride, self.window, self.pooling_type = stride, window or stride, pooling_type

    def __call__(
        self, inputs: jax.Array, paddings: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the outputs and their paddings.

        Args:
          inputs: [B, T, ...].
          paddings: [B, T], 1.0 for times to ignore.
        """
        # An output is padding if the input at its position is padding.
        strided = None if paddings is None else paddings[:, :: self.stride]
        if self.window == 1:
            return inputs[:, :: self.stride], strided

        def to_rank(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape, *(1,) * (inputs.ndim - 2))

        rest = (1,) * (inputs.ndim - 2)
        windows = (1, self.window, *rest), (1, self.stride, *rest), "SAME"
        is_true = jnp.ones((1, inputs.shape[1])) if paddings is None else 1.0 - paddings
        if self.pooling_type == "MAX":
            inputs = jnp.where(to_rank(is_true) > 0, inputs, _lowest(inputs.dtype))
            outputs = _max_over(inputs, *windows)
            if strided is not None:
                outputs = jnp.where(to_rank(strided) < 1, outputs, 0)
        else:
            total = _sum_over(jnp.where(to_rank(is_true) > 0, inputs, 0), *windows)
            count = _sum_over(to_rank(is_true), *windows)
            outputs = (total * _inverse(count)).astype(inputs.dtype)
        return constrain(outputs, self.activation_split_dims_mapping), strided
