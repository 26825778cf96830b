"""Two models in plain Flax Linen, without imports from this library."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

__all__ = ["CausalLm", "DecoderBlock", "EncoderBlock", "VisionTransformer"]

# B batch, T patches or tokens, D model dims, V vocabulary.


class EncoderBlock(nn.Module):
    """A pre-norm transformer block without sharding annotations."""

    num_heads: int
    mlp_dims: int
    dropout: float

    @nn.compact
    def __call__(self, x_BTD: jax.Array, *, train: bool) -> jax.Array:
        y = nn.LayerNorm()(x_BTD)
        y = nn.MultiHeadDotProductAttention(self.num_heads)(y)
        x_BTD = x_BTD + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.gelu(nn.Dense(self.mlp_dims)(nn.LayerNorm()(x_BTD)))
        y = nn.Dense(x_BTD.shape[-1])(y)
        return x_BTD + nn.Dropout(self.dropout, deterministic=not train)(y)


class VisionTransformer(nn.Module):
    """Maps images [B, H, W, C] to logits [B, num_classes]."""

    num_classes: int = 10
    patch_size: int = 2
    model_dims: int = 45
    mlp_dims: int = 91
    num_heads: int = 3
    num_layers: int = 3
    dropout: float = 0.1

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.model_dims, patch, strides=patch, padding="VALID")(images)
        x_BTD = x.reshape(x.shape[0], -1, self.model_dims)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.model_dims))
        cls = jnp.broadcast_to(cls, (x.shape[0], 1, self.model_dims))
        x_BTD = jnp.concatenate([cls, x_BTD], axis=1)
        shape = (1, *x_BTD.shape[1:])
        x_BTD = x_BTD + self.param("positions", nn.initializers.normal(0.02), shape)
        for _ in range(self.num_layers):
            block = EncoderBlock(self.num_heads, self.mlp_dims, self.dropout)
            x_BTD = block(x_BTD, train=train)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x_BTD[:, 0]))


LECUN = nn.initializers.lecun_normal()


def named(*names: str | None, draw: Any = LECUN) -> Any:
    """Wraps an initializer so that the dims of its weight have logical axis names."""
    return nn.with_logical_partitioning(draw, names)


class DecoderBlock(nn.Module):
    """A causal transformer block with logical axis names, used as the body of a scan."""

    num_heads: int
    mlp_dims: int
    dropout: float
    train: bool

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        def dropped(y: jax.Array) -> jax.Array:
            y = nn.Dropout(self.dropout, deterministic=not self.train)(y)
            return nn.with_logical_constraint(y, ("batch", "length", "activation_embed"))

        y = nn.MultiHeadDotProductAttention(
            self.num_heads,
            use_bias=False,
            kernel_init=named("embed", "heads", "kv"),
            out_kernel_init=named("heads", "kv", "embed"),
        )(nn.RMSNorm()(x_BTD), mask=mask)
        x_BTD = x_BTD + dropped(y)
        y = nn.Dense(self.mlp_dims, use_bias=False, kernel_init=named("embed", "mlp"))
        y = nn.gelu(y(nn.RMSNorm()(x_BTD)))
        y = nn.with_logical_constraint(y, ("batch", "length", "mlp"))
        y = nn.Dense(x_BTD.shape[-1], use_bias=False, kernel_init=named("mlp", "embed"))(y)
        return x_BTD + dropped(y), None


class CausalLm(nn.Module):
    """Maps tokens [B, T] to logits [B, T, V] for next tokens; blocks are scanned with remat."""

    vocab_size: int = 257
    model_dims: int = 145
    mlp_dims: int = 435
    num_heads: int = 5
    num_layers: int = 4
    max_length: int = 256
    dropout: float = 0.0

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        small = nn.initializers.normal(self.model_dims**-0.5)
        embed = nn.Embed(
            self.vocab_size, self.model_dims, embedding_init=named("vocab", "embed", draw=small)
        )
        x_BTD = embed(ids) * self.model_dims**0.5
        # A short causal convolution learns n-grams much earlier than attention.
        x_BTD = nn.Conv(
            self.model_dims,
            (4,),
            padding="CAUSAL",
            use_bias=False,
            kernel_init=named(None, None, "embed"),
            name="neighbors",
        )(x_BTD)
        shape = (self.max_length, self.model_dims)
        positions = self.param("positions", named(None, "embed", draw=small), shape)
        x_BTD = x_BTD + positions[None, : ids.shape[1]]
        x_BTD = nn.with_logical_constraint(x_BTD, ("batch", "length", "activation_embed"))
        stack = nn.scan(
            nn.remat(DecoderBlock, prevent_cse=False),
            length=self.num_layers,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        blocks = stack(self.num_heads, self.mlp_dims, self.dropout, train, name="blocks")
        x_BTD, _ = blocks(x_BTD, nn.make_causal_mask(ids))
        logits_BTV = embed.attend(nn.RMSNorm()(x_BTD))
        return nn.with_logical_constraint(logits_BTV, ("batch", "length", "vocab"))
