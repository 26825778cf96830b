"""Vision transformer: patches in, blocks that see the whole image, features out. Names are Pax's.

Dosovitskiy et al. 2020, arXiv:2010.11929.
"""

from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax
from flax import nnx

from praxis_lite.core.sharding.split_dims import constrain
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.base.base_layer import BaseLayer
from praxis_lite.layers.base.dims import RESIDUAL, splits
from praxis_lite.layers.stacking.repeats import StackedTransformer
from praxis_lite.layers.stacking.residual_branches import split_keys
from praxis_lite.layers.transformer.transformers import Transformer
from praxis_lite.layers.vision.vit_entry_exit import VitEntryLayers, VitExitLayers

# B batch, H height, W width, C channels, P patch size, N tokens, D model dims.


class VisionTransformer(BaseLayer):
    """Returns features of images: [B, H, W, C], or patches [B, N, P^2 C], -> [B, D].

    Pax's `full_data_parallel_on_entry_exit` is said by the splits of entry and exit: a batch over
    all mesh axes.

    Args:
      entry_layers_tpl: called with (rngs=), makes tokens [B, N, D]; None: inputs are tokens.
      transformer_layers_tpl: the stack, called with (rngs=); its blocks are not causal.
      exit_layers_tpl: called with (rngs=), makes features of tokens; None: the tokens themselves.
      activation_split_dims_mapping: of the tokens between entry, stack and exit, [B, N, D].
    """

    splits = splits(activation=RESIDUAL)

    def __init__(
        self,
        entry_layers_tpl: Callable[..., Any] | None,
        transformer_layers_tpl: Callable[..., Any],
        exit_layers_tpl: Callable[..., Any] | None,
        *,
        rngs: nnx.Rngs,
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
        """Args: paddings [B, N], 1.0 where the stack shall not look; a mean over tokens does.

        A key means a training pass.
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
    """Returns the config of a VisionTransformer of these sizes, to set the rest in.

    As Pax's `build_vision_transformer_hparams_for_test`, whose attention has no per-dim scale; the
    parts are `entry_layers_tpl`, `transformer_layers_tpl.block` and `exit_layers_tpl`.
    """
    block = fdl.Partial(
        Transformer, model_dims, mlp_dims, num_heads, mask_self_attention=False,
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
