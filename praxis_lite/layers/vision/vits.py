"""Vision transformer: a transformer whose tokens are image patches, with Pax's names.

Dosovitskiy et al. 2020, arXiv:2010.11929.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.axis_types import typed_as
from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.base.base_layer import BaseLayer, broadcast_as, zeros
from praxis_lite.layers.base.calls import require_positive
from praxis_lite.layers.base.dims import NONE, RESIDUAL, SplitSetting, splits
from praxis_lite.layers.base.result_types import reshaped
from praxis_lite.layers.embedding.positional_embeddings import TrainablePositionalEmbedding
from praxis_lite.layers.linears import FeedForward
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.stacking.repeats import StackedTransformer
from praxis_lite.layers.stacking.residual_branches import split_keys
from praxis_lite.layers.stochastics import Dropout
from praxis_lite.layers.transformer.transformers import Transformer
from praxis_lite.layers.vision.convolutions import check_sizes
from praxis_lite.layers.vision.poolings import GlobalPooling

# B batch, H height, W width, C channels, P patch size, N tokens, D model dims.
_token_mean = functools.partial(GlobalPooling, pooling_dims=(1,))


def image_to_patch(images: jax.Array, patch_size: int) -> jax.Array:
    """Cuts images into flattened patches, row by row: [B, H, W, C] -> [B, H W / P^2, P^2 C].

    Raises:
      ConfigError: The images do not have rank 4, or their sizes are not divisible by the patch
        size.
    """
    if images.ndim != 4 or images.shape[1] % patch_size or images.shape[2] % patch_size:
        raise ConfigError(
            f"patch_size is {patch_size}, but images have shape {images.shape}; expected "
            "[B, H, W, C], with H and W divisible by patch_size. Change patch_size, or crop the "
            "images."
        )
    batch, height, width, channels = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = reshaped(images, (batch, rows, patch_size, columns, patch_size, channels))
    patches = cut.transpose(0, 1, 3, 2, 4, 5)
    return reshaped(patches, (batch, rows * columns, patch_size**2 * channels))


class VitEntryLayers(BaseLayer):
    """Maps images [B, H, W, C], or patches [B, N, input_dims], to tokens [B, N', D].

    A token is the projection of a patch plus the learned embedding of its position. Class tokens
    can be added at both ends.

    Args:
      pos_emb_shapes: Numbers of rows and columns of patches with learned positions, or a single
        number of tokens. With rows and columns, positions are interpolated for other image sizes.
      patch_size: P.
      input_dims: Number of elements in a patch, P^2 C.
      output_dims: D.
      pos_emb_dropout_prob: Dropout probability of the tokens.
      prepend_cls_tokens: Number of learned tokens, without positions, to add at the beginning.
      append_cls_tokens: Number of learned tokens, without positions, to add at the end.
      pos_emb_tpl: Builds the position embedding from (number of positions, D, rngs=), or None.
      input_fc_has_bias: Whether to add a bias to the projection.
      weight_split_dims_mapping: Sharding of the projection's weight [input_dims, D].
      activation_split_dims_mapping: Sharding of the outputs [B, N', D].

    Raises:
      ConfigError: When called: the image size is not divisible by the patch size, the size of a
        patch is not input_dims, or the number of patches differs from the number of positions.
    """

    splits = splits(weight=(None, "embed"), activation=RESIDUAL)

    def __init__(
        self,
        pos_emb_shapes: Sequence[int],
        patch_size: int,
        input_dims: int,
        output_dims: int,
        *,
        pos_emb_dropout_prob: float = 0.0,
        prepend_cls_tokens: int = 0,
        append_cls_tokens: int = 0,
        pos_emb_tpl: Callable[..., Any] | None = TrainablePositionalEmbedding,
        input_fc_has_bias: bool = True,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        sizes = {"input_dims": input_dims, "output_dims": output_dims}
        require_positive(self, patch_size=patch_size, **sizes)
        check_sizes(self, 1 if len(pos_emb_shapes) == 1 else 2, pos_emb_shapes=pos_emb_shapes)
        patch_dims, D = self.dims(input_dims, output_dims)
        self.patch_projection = FeedForward(
            patch_dims, D, has_bias=input_fc_has_bias, activation="identity", rngs=rngs
        )
        num_positions = math.prod(pos_emb_shapes)
        self.pos_emb = pos_emb_tpl(num_positions, output_dims, rngs=rngs) if pos_emb_tpl else None
        self.dropout = Dropout(pos_emb_dropout_prob)

        def class_tokens(name: str, count: int) -> nnx.Param | None:
            if count == 0:
                return None
            require_positive(self, **{name: count})
            return self.weight((1, count, D), init=zeros, matrix=NONE, rngs=rngs)

        self.prepend_cls_embs = class_tokens("prepend_cls_tokens", prepend_cls_tokens)
        self.append_cls_embs = class_tokens("append_cls_tokens", append_cls_tokens)
        self.pos_emb_shapes, self.patch_size = tuple(pos_emb_shapes), patch_size
        self.input_dims = input_dims

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns the tokens; a key enables dropout."""
        patches = inputs if inputs.ndim == 3 else image_to_patch(inputs, self.patch_size)
        if patches.shape[-1] != self.input_dims:
            raise ConfigError(
                f"VitEntryLayers.input_dims is {self.input_dims}, but a patch of inputs "
                f"{inputs.shape} has {patches.shape[-1]} elements. Set input_dims to the patch "
                f"size squared times the number of channels."
            )
        features = self.patch_projection(patches)
        if self.pos_emb is not None:
            features += broadcast_as(self._positions(inputs, patches.shape[1]), features)
        features = self.dropout(features, key)

        def tokens(weight: nnx.Param | None) -> list[jax.Array]:
            if weight is None:
                return []
            # Cast after broadcasting, as `broadcast_as` does.
            w = jnp.broadcast_to(weight[...], (features.shape[0], *weight.shape[1:]))
            return [typed_as(w.astype(features.dtype), features)]

        parts = [*tokens(self.prepend_cls_embs), features, *tokens(self.append_cls_embs)]
        outputs = jnp.concatenate(parts, axis=1) if len(parts) > 1 else features
        return constrain(outputs, self.activation_split_dims_mapping)

    def _positions(self, inputs: jax.Array, num_patches: int) -> jax.Array:
        """Returns embeddings [1, N, D], interpolated if the image has a different grid."""
        assert self.pos_emb is not None
        embs = self.pos_emb(seq_length=math.prod(self.pos_emb_shapes))
        if inputs.ndim == 4 and len(self.pos_emb_shapes) == 2:
            grid = tuple(size // self.patch_size for size in inputs.shape[1:3])
            if grid != self.pos_emb_shapes:
                embs = embs.reshape(*self.pos_emb_shapes, -1)
                embs = jax.image.resize(embs, (*grid, embs.shape[-1]), "bilinear")
                return embs.reshape(1, num_patches, -1)
        if embs.shape[1] != num_patches:
            raise ConfigError(
                f"VitEntryLayers.pos_emb_shapes is {self.pos_emb_shapes}, but inputs "
                f"{inputs.shape} have {num_patches} patches. Set pos_emb_shapes to the numbers of "
                "rows and columns of patches."
            )
        return embs


class ClassTokenPooling(BaseLayer):
    """Selects one token per image, [B, N, D] -> [B, D]; for `VitExitLayers.pooling_tpl`.

    Args:
      index: Index of the token: 0 for the first token that VitEntryLayers prepends, or -1 for the
        last token that it appends.
    """

    def __init__(self, index: int = 0, *, rngs: nnx.Rngs | None = None):
        self.index = index

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return inputs[:, self.index]


class VitExitLayers(BaseLayer):
    """Maps tokens [B, N, hidden_dim] to features [B, output_dim], or [B, N, ...] if not pooled.

    Applies a norm, the mean over tokens and a projection with tanh.

    Args:
      hidden_dim: Size of a token.
      output_dim: Size of the features. If 0, hidden_dim.
      output_dropout_prob: Dropout probability of the features.
      pooled: Whether to pool the tokens. If False, features of every token are returned.
      pre_ln: Whether to apply a norm first.
      output_fc_tanh: Whether to apply a projection with tanh. If False, a projection without tanh
        is applied if output_dim differs from hidden_dim.
      output_fc_has_bias: Whether to add a bias to the projection.
      pooling_tpl: Builds the pooling of the tokens from (rngs=), by default the mean. Use
        ClassTokenPooling to select the class token. Pax's default fails, because it sets no dims.
      ln_tpl: Builds the norm from (hidden_dim, rngs=).
      weight_split_dims_mapping: Sharding of the projection's weight [hidden_dim, output_dim].
      activation_split_dims_mapping: Sharding of the outputs.
    """

    # Features may belong to an image or to each token.
    splits = splits(weight=("embed", None), activation=("batch",))

    def __init__(
        self,
        hidden_dim: int,
        output_dim: int = 0,
        *,
        output_dropout_prob: float = 0.0,
        pooled: bool = True,
        pre_ln: bool = True,
        output_fc_tanh: bool = True,
        output_fc_has_bias: bool = True,
        pooling_tpl: Callable[..., Any] = _token_mean,
        ln_tpl: Callable[..., Any] = LayerNorm,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        output_dim = hidden_dim if output_dim == 0 else output_dim
        require_positive(self, hidden_dim=hidden_dim, output_dim=output_dim)

        def projection(activation: str) -> FeedForward:
            return FeedForward(
                *self.dims(hidden_dim, output_dim),
                has_bias=output_fc_has_bias,
                activation=activation,
                rngs=rngs,
            )

        needs_projection = not output_fc_tanh and output_dim != hidden_dim
        self.ln = ln_tpl(hidden_dim, rngs=rngs) if pre_ln else None
        self.pooling = pooling_tpl(rngs=rngs) if pooled else None
        self.fc_tanh = projection("tanh") if output_fc_tanh else None
        self.output_projection = projection("identity") if needs_projection else None
        self.dropout = Dropout(output_dropout_prob)

    def __call__(self, inputs: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns the features; a key enables dropout."""
        outputs = inputs if self.ln is None else self.ln(inputs)
        for layer in (self.pooling, self.fc_tanh, self.output_projection):
            outputs = outputs if layer is None else layer(outputs)
        return constrain(self.dropout(outputs, key), self.activation_split_dims_mapping)


class VisionTransformer(BaseLayer):
    """Maps images [B, H, W, C], or patches [B, N, P^2 C], to features [B, D].

    Pax's `full_data_parallel_on_entry_exit` corresponds to entry and exit layers whose batch is
    sharded over all mesh axes.

    Args:
      entry_layers_tpl: Builds the layer that returns tokens [B, N, D] from (rngs=). If None, the
        inputs are tokens.
      transformer_layers_tpl: Builds the stack from (rngs=); its blocks are not causal.
      exit_layers_tpl: Builds the layer that maps tokens to features from (rngs=). If None, tokens
        are returned.
      activation_split_dims_mapping: Sharding of the tokens [B, N, D] between entry, stack and exit.
    """

    splits = splits(activation=RESIDUAL)

    def __init__(
        self,
        entry_layers_tpl: Callable[..., Any] | None,
        transformer_layers_tpl: Callable[..., Any],
        exit_layers_tpl: Callable[..., Any] | None,
        *,
        rngs: nnx.Rngs,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        self.entry_stack = entry_layers_tpl(rngs=rngs) if entry_layers_tpl else None
        self.transformers_stack = transformer_layers_tpl(rngs=rngs)
        self.exit_stack = exit_layers_tpl(rngs=rngs) if exit_layers_tpl else None

    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the features.

        Args:
          inputs: Images or patches.
          paddings: Float [B, N], 1.0 for tokens that the stack ignores. The mean over tokens still
            includes them.
          key: Random key; selects training mode.
        """
        keys = split_keys(key, 3)
        features = inputs if self.entry_stack is None else self.entry_stack(inputs, key=keys[0])
        features = constrain(features, self.activation_split_dims_mapping)
        features, _ = self.transformers_stack(features, paddings=paddings, key=keys[1])
        features = constrain(features, self.activation_split_dims_mapping)
        return features if self.exit_stack is None else self.exit_stack(features, key=keys[2])


def build_vision_transformer(
    pos_emb_shapes: Sequence[int],
    patch_size: int,
    image_channels: int,
    model_dims: int,
    mlp_dims: int,
    num_xformer_layers: int,
    num_heads: int,
) -> fdl.Partial:
    """Returns the config of a VisionTransformer with these sizes; its settings can be changed.

    It is equivalent to Pax's `build_vision_transformer_hparams_for_test`, whose attention has no
    per-dim scale.
    """
    block = fdl.Partial(
        Transformer,
        model_dims,
        mlp_dims,
        num_heads,
        mask_self_attention=False,
        tr_atten_tpl=fdl.Partial(DotProductAttention, internal_enable_per_dim_scale=False),
    )
    return fdl.Partial(
        VisionTransformer,
        entry_layers_tpl=fdl.Partial(
            VitEntryLayers, pos_emb_shapes, patch_size, patch_size**2 * image_channels, model_dims
        ),
        transformer_layers_tpl=fdl.Partial(StackedTransformer, block, num_xformer_layers),
        exit_layers_tpl=fdl.Partial(VitExitLayers, model_dims, model_dims),
    )
