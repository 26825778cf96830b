"""Convolutional residual networks, with Pax's names, structure and defaults."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.layers.activations import ActivationFn, activation_fn
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.stochastics import StochasticResidual
from praxis_lite.layers.vision.batch_norms import BatchNorm
from praxis_lite.layers.vision.convolutions import ConvBNAct, check_sizes
from praxis_lite.layers.vision.poolings import GlobalPooling, Pooling

# B batch, H height, W width, C channels.
Filter = tuple[tuple[int, int, int, int], int]

# Pax's GaussianSqrtFanOut(1.4141): He et al. 2015, arXiv:1502.01852.
_he_fan_out = jax.nn.initializers.variance_scaling(1.4141**2, "fan_out", "normal")
_pax_conv_params = functools.partial(
    ConvBNAct, batch_norm_tpl=functools.partial(BatchNorm, decay=0.9), kernel_init=_he_fan_out
)
_spatial_mean = functools.partial(GlobalPooling, pooling_dims=(1, 2))


class ResNetBlock(BaseLayer):
    """Computes `activation(x + convs(x))`: [B, H, W, input_dim] -> [B, H', W', output_dim].

    The bottleneck consists of a 1x1 convolution to a quarter of the output channels, a convolution
    with `kernel_size` and `stride`, and a 1x1 convolution to the output channels. If the shape
    changes, a 1x1 convolution is also applied to x. H' is ceil(H / stride). He et al. 2015,
    arXiv:1512.03385.

    Args:
      conv_params: Builds a convolution with norm and activation from (filter_shape, stride,
        activation=, rngs=).
      activation: Activation between the convolutions and at the end (Pax's activation_tpl).
      residual_droppath_prob: Probability that the convolutions are skipped for an example in
        training.
      zero_init_residual: Whether to initialize the scale of the last norm to 0, so that the block
        starts as the identity (arXiv:1706.02677).

    Raises:
      ConfigError: zero_init_residual is set, but the last norm has no gamma.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        conv_params: Callable[..., Any] = ConvBNAct,
        kernel_size: int = 3,
        stride: int = 1,
        activation: str | ActivationFn = "relu",
        residual_droppath_prob: float = 0.0,
        zero_init_residual: bool = False,
        rngs: nnx.Rngs,
    ):
        sizes = {"input_dim": input_dim, "output_dim": output_dim}
        require_positive(self, **sizes, kernel_size=kernel_size, stride=stride)
        activation_fn(activation, self)
        filters = self._filters(input_dim, output_dim, kernel_size, stride)
        for i, (filter_shape, filter_stride) in enumerate(filters):
            between = "identity" if i == len(filters) - 1 else activation
            strides = (filter_stride, filter_stride)
            conv = conv_params(filter_shape, strides, activation=between, rngs=rngs)
            setattr(self, f"body_{i}", conv)  # Pax's names.
        if zero_init_residual:
            gamma = getattr(getattr(conv, "bn", None), "gamma", None)
            if gamma is None:
                raise ConfigError(
                    f"{type(self).__name__}.zero_init_residual=True requires a norm with a gamma, "
                    "but conv_params builds a convolution without such a norm. Set batch_norm_tpl "
                    "in conv_params, or zero_init_residual=False."
                )
            gamma.set_value(jnp.full(gamma.shape, -1.0))  # Gamma is stored as scale - 1.
        self.num_convs = len(filters)
        shape, strides = (1, 1, input_dim, output_dim), (stride, stride)
        is_same = input_dim == output_dim and stride == 1
        make = functools.partial(conv_params, shape, strides, activation="identity", rngs=rngs)
        self.shortcut = None if is_same else make()
        self.residual_droppath = StochasticResidual(survival_prob=1.0 - residual_droppath_prob)
        self.activation = activation

    def _filters(
        self, input_dim: int, output_dim: int, kernel_size: int, stride: int
    ) -> list[Filter]:
        """Returns the shape and stride of each convolution."""
        name = f"{type(self).__name__}.output_dim"
        expected = "4 or more, because the middle convolution has a quarter of the channels"
        require(output_dim >= 4, name, output_dim, expected)
        inner = output_dim // 4
        return [
            ((1, 1, input_dim, inner), 1),
            ((kernel_size, kernel_size, inner, inner), stride),
            ((1, 1, inner, output_dim), 1),
        ]

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns the outputs; passing a key selects training mode, with batch statistics."""
        outputs = inputs
        for i in range(self.num_convs):
            outputs = getattr(self, f"body_{i}")(outputs, key=key)
        if self.shortcut is not None:
            inputs = self.shortcut(inputs, key=key)
        return activation_fn(self.activation, self)(self.residual_droppath(inputs, outputs, key))


class ResNetBasicBlock(ResNetBlock):
    """Computes `activation(x + convs(x))` with two convolutions; only the first has a stride.

    See ResNetBlock for the settings.
    """

    def _filters(
        self, input_dim: int, output_dim: int, kernel_size: int, stride: int
    ) -> list[Filter]:
        return [
            ((kernel_size, kernel_size, input_dim, output_dim), stride),
            ((kernel_size, kernel_size, output_dim, output_dim), 1),
        ]


class ResNet(BaseLayer):
    """Maps images [B, H, W, C] to features [B, channels[-1]]; the defaults define ResNet-50.

    The network consists of an entry convolution, a 3x3 max pooling with stride 2, stages of blocks,
    and a mean over all positions. ResNet-101 has blocks=(3, 4, 23, 3), and ResNet-152 has
    blocks=(3, 8, 36, 3). ResNet-18 has block_params=ResNetBasicBlock, channels=(64, 128, 256, 512)
    and blocks=(2, 2, 2, 2). ResNet-34 is like ResNet-18, but with blocks=(3, 4, 6, 3).

    Args:
      conv_params: Builds a convolution with norm and activation; its settings include sharding.
      block_params: Builds a block from (input_dim, output_dim, conv_params=, kernel_size=, stride=,
        rngs=).
      strides: Stride of the first block in each stage.
      channels: Output channels of each stage.
      blocks: Number of blocks in each stage.
      kernels: Kernel size of each stage.
      entryflow_conv_kernel: Height, width and input channels of the entry convolution.
      entryflow_conv_stride: Strides of the entry convolution along height and width.
      output_spatial_pooling_params: Builds the final pooling from (rngs=). If None, features are
        [B, H', W', channels[-1]].
      return_block_features: Whether to return a dict with the features of each stage instead; keys
        start at 2.
      entry_max_pool: Whether to apply the max pooling after the entry convolution.
    """

    def __init__(
        self,
        *,
        conv_params: Callable[..., Any] = _pax_conv_params,
        block_params: Callable[..., Any] = ResNetBlock,
        strides: Sequence[int] = (1, 2, 2, 2),
        channels: Sequence[int] = (256, 512, 1024, 2048),
        blocks: Sequence[int] = (3, 4, 6, 3),
        kernels: Sequence[int] = (3, 3, 3, 3),
        entryflow_conv_kernel: Sequence[int] = (7, 7, 3),
        entryflow_conv_stride: Sequence[int] = (2, 2),
        output_spatial_pooling_params: Callable[..., Any] | None = _spatial_mean,
        return_block_features: bool = False,
        entry_max_pool: bool = True,
        rngs: nnx.Rngs,
    ):
        sizes = {"strides": strides, "channels": channels, "blocks": blocks, "kernels": kernels}
        check_sizes(self, len(strides), **sizes)
        check_sizes(self, 3, entryflow_conv_kernel=entryflow_conv_kernel)
        # As in Pax, the inner convolutions of a bottleneck have a quarter of its channels.
        is_bottleneck = getattr(block_params, "func", block_params) is ResNetBlock
        width = channels[0] // 4 if is_bottleneck else channels[0]
        self.entryflow_conv = conv_params(
            (*entryflow_conv_kernel, width), tuple(entryflow_conv_stride), rngs=rngs
        )
        self.entryflow_maxpool = Pooling((3, 3), (2, 2)) if entry_max_pool else None
        names: list[list[str]] = []
        stages = zip(channels, blocks, kernels, strides, strict=True)
        for stage, (channel, num_blocks, kernel, stride) in enumerate(stages):
            names.append([f"stage_{stage}_block_{i}" for i in range(num_blocks)])
            for i, name in enumerate(names[-1]):
                block = block_params(
                    width,
                    channel,
                    conv_params=conv_params,
                    kernel_size=kernel,
                    stride=stride if i == 0 else 1,
                    rngs=rngs,
                )
                setattr(self, name, block)  # Pax's names.
                width = channel
        pooling_tpl = output_spatial_pooling_params
        self.output_spatial_pooling = pooling_tpl(rngs=rngs) if pooling_tpl else None
        self.block_names = tuple(map(tuple, names))
        self.return_block_features = return_block_features

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> Any:
        """Returns the features; passing a key selects training mode, with batch statistics."""
        outputs, features = self.entryflow_conv(inputs, key=key), {}
        if self.entryflow_maxpool is not None:
            outputs, _ = self.entryflow_maxpool(outputs)
        for stage, names in enumerate(self.block_names):
            for name in names:
                key, block_key = (None, None) if key is None else jax.random.split(key)
                outputs = getattr(self, name)(outputs, key=block_key)
            features[2 + stage] = outputs
        if self.return_block_features:
            return features
        pooling = self.output_spatial_pooling
        return outputs if pooling is None else pooling(outputs)
