"""Convolutions over images and over time, with Pax's names, weights and numerics."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, broadcast_as, xavier, zeros
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.base.dims import NONE, Matrix, SplitSetting, splits
from praxis_lite.layers.base.result_types import convolved, elementwise
from praxis_lite.layers.normalizations import IdentityNorm
from praxis_lite.layers.vision.batch_norms import BatchNorm

# B batch, H height (or time), W width, C input channels, D output channels.
PADDINGS = ("SAME", "VALID")
_WINDOW_MATRIX = Matrix(contracted=(0, 1, 2), outputs=(3,))


def check_sizes(layer: object, count: int, **settings: Sequence[int]) -> None:
    """Checks that settings are sequences of `count` positive integers.

    Raises:
      ConfigError: A setting is not a list of `count` positive integers.
    """
    for name, sizes in settings.items():
        is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
        require(
            is_list and len(sizes) == count,
            f"{type(layer).__name__}.{name}",
            sizes,
            f"a list of {count} positive integers",
        )
        require_positive(layer, **{f"{name}[{i}]": size for i, size in enumerate(sizes)})


class Conv2D(BaseLayer):
    """Convolves images with a learned filter: [B, H, W, C] -> [B, H', W', D].

    The weight is `w` [height, width, C per group, D], and the bias is `b` [D].

    Args:
      filter_shape: Height, width, input channels, output channels. If the filter has fewer input
        channels than the inputs, this is a grouped convolution: channels are divided into groups,
        and each group computes an equal part of the outputs. With 1 input channel, it is depthwise.
      filter_stride: Strides along height and width.
      dilations: Dilations of the filter along height and width.
      bias: Whether to add a learned bias.
      kernel_init: Initializer of the weight.
      bias_init: Initializer of the bias.
      padding: 'SAME' (zeros around the image) or 'VALID' (only windows inside the image).
      tf_equivalent_padding: Whether 'SAME' pads as in TensorFlow and XLA, only as much as
        ceil(H / stride) outputs require. If False, as in Pax, 'SAME' adds kernel - 1 zeros for any
        stride, half of them (rounded down) before the image.
      is_causal: Whether outputs do not depend on later inputs along height (time). Requires 'SAME'
        and tf_equivalent_padding.
      weight_norm_tpl: Builds a norm for the weight from (D, rngs=).
      weight_split_dims_mapping: Sharding of `w`; the bias is sharded like its last dim.
      activation_split_dims_mapping: Sharding of the outputs [B, H', W', D].

    Raises:
      ConfigError: A setting has the wrong type, the number of input channels is not a multiple of
        the filter's input channels, or D is not divisible by the number of groups.
    """

    splits = splits(weight=(), activation=())

    def __init__(
        self,
        filter_shape: Sequence[int],
        filter_stride: Sequence[int] = (1, 1),
        *,
        dilations: Sequence[int] = (1, 1),
        bias: bool = False,
        kernel_init: Initializer = xavier,
        bias_init: Initializer = zeros,
        padding: str = "SAME",
        tf_equivalent_padding: bool = False,
        is_causal: bool = False,
        weight_norm_tpl: Callable[..., Any] = IdentityNorm,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        check_sizes(self, 4, filter_shape=filter_shape)
        check_sizes(self, 2, filter_stride=filter_stride, dilations=dilations)
        require_choice(f"{type(self).__name__}.padding", padding, PADDINGS)
        if is_causal and (padding != "SAME" or not tf_equivalent_padding):
            raise ConfigError(
                f"{type(self).__name__}.is_causal is True, but padding is {padding!r} and "
                f"tf_equivalent_padding is {tf_equivalent_padding}. Set padding='SAME' and "
                "tf_equivalent_padding=True."
            )
        dims = self.dims(*filter_shape)
        self.w = self.weight(dims, init=kernel_init, matrix=_WINDOW_MATRIX, rngs=rngs)
        self.b = self.weight(dims[-1:], init=bias_init, rngs=rngs) if bias else None
        self.weight_norm = weight_norm_tpl(filter_shape[-1], rngs=rngs)
        self.filter_shape, self.filter_stride = tuple(filter_shape), tuple(filter_stride)
        self.dilations, self.padding = tuple(dilations), padding
        self.tf_equivalent_padding, self.is_causal = tf_equivalent_padding, is_causal

    def _lax_padding(self) -> str | list[tuple[int, int]]:
        if self.padding == "VALID" or (self.tf_equivalent_padding and not self.is_causal):
            return self.padding
        sizes = zip(self.dilations, self.filter_shape[:2], strict=True)
        totals = [dilation * (size - 1) for dilation, size in sizes]
        pads = [(total // 2, total - total // 2) for total in totals]
        # A causal output sees no later rows, so all padding along the height comes first.
        return [(totals[0], 0), pads[1]] if self.is_causal else pads

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return constrain(self._convolved(inputs), self.activation_split_dims_mapping)

    def _convolved(self, inputs: jax.Array) -> jax.Array:
        channels, (_, _, per_group, num_outputs) = inputs.shape[-1], self.filter_shape
        num_groups = channels // per_group
        if inputs.ndim != 4 or channels % per_group or num_outputs % max(num_groups, 1):
            raise ConfigError(
                f"{type(self).__name__}.filter_shape is {self.filter_shape}, but inputs have shape "
                f"{inputs.shape}; expected [B, H, W, C], where C is a multiple of the filter's "
                "input channels, and C / input channels divides the filter's output channels."
            )
        outputs = convolved(
            inputs,
            self.weight_norm(elementwise(self.w[...])).astype(inputs.dtype),
            window_strides=self.filter_stride,
            padding=self._lax_padding(),
            rhs_dilation=self.dilations,
            feature_group_count=num_groups,
        )
        if self.b is not None:
            outputs += broadcast_as(self.b[...], outputs)
        return outputs


class ConvBNAct(Conv2D):
    """Computes `activation(norm(conv(x)))`: [B, H, W, C] -> [B, H', W', D].

    See Conv2D for further settings.

    Args:
      batch_norm_tpl: Builds the norm from (D, rngs=). Its call takes outputs and `key=`. If None,
        there is no norm.
      activation: A name in `activations.ACTIVATIONS`, or a function (Pax's activation_tpl).
    """

    @inherit_params(Conv2D)
    def __init__(
        self,
        filter_shape: Sequence[int],
        filter_stride: Sequence[int] = (1, 1),
        *,
        batch_norm_tpl: Callable[..., Any] | None = BatchNorm,
        activation: str | ActivationFn = "relu",
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        super().__init__(filter_shape, filter_stride, rngs=rngs, **settings)
        activation_fn(activation, self)
        self.bn = None if batch_norm_tpl is None else batch_norm_tpl(filter_shape[-1], rngs=rngs)
        self.activation = activation

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        outputs = self._convolved(inputs)
        if self.bn is not None:
            outputs = self.bn(outputs, key=key)
        outputs = activation_fn(self.activation, self)(outputs)
        return constrain(outputs, self.activation_split_dims_mapping)


class DepthwiseConv1D(BaseLayer):
    """Convolves each channel of a sequence over time: [B, T, C] -> [B, T, C * multiplier].

    The weight is `w` [kernel, 1, C * multiplier], and the bias is `b` [C * multiplier].

    Args:
      filter_shape: Kernel size, input channels, channel multiplier.
      bias: Whether to add a learned bias.
      is_causal: Whether outputs do not depend on later inputs. If False, zeros are added
        symmetrically.
      rhs_dilation_rate: Dilation of the filter.
      weight_split_dims_mapping: Sharding of `w`; the bias is sharded like its last dim.
    """

    splits = splits(weight=(), activation=())

    def __init__(
        self,
        filter_shape: Sequence[int],
        *,
        bias: bool = False,
        bias_init: Initializer = zeros,
        is_causal: bool = False,
        rhs_dilation_rate: int = 1,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        check_sizes(self, 3, filter_shape=filter_shape)
        require_positive(self, rhs_dilation_rate=rhs_dilation_rate)
        kernel, channels, multiplier = filter_shape
        dims = self.dims(kernel, 1, channels * multiplier)
        self.w = self.weight(dims, matrix=NONE, rngs=rngs)
        self.b = self.weight(dims[2:], init=bias_init, rngs=rngs) if bias else None
        self.filter_shape, self.is_causal = tuple(filter_shape), is_causal
        self.rhs_dilation_rate = rhs_dilation_rate

    def __call__(self, inputs: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
        """Returns the outputs, [B, T, C * multiplier].

        Args:
          inputs: [B, T, C].
          paddings: [B, T]; inputs are set to zero where paddings are 1.0.
        """
        if paddings is not None:
            inputs = jnp.where(paddings[..., None] > 0, 0, inputs)
        before = self.rhs_dilation_rate * (self.filter_shape[0] - 1)
        outputs = convolved(
            inputs,
            elementwise(self.w[...]).astype(inputs.dtype),
            window_strides=(1,),
            padding=[(before, 0)] if self.is_causal else "SAME",
            rhs_dilation=(self.rhs_dilation_rate,),
            feature_group_count=self.filter_shape[1],
        )
        if self.b is not None:
            outputs += broadcast_as(self.b[...], outputs)
        return constrain(outputs, self.activation_split_dims_mapping)
