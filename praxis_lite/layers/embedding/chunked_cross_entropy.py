"""Softmax cross-entropy that computes logits in chunks of classes, without storing all logits.

One pass over the classes maintains, per token, the maximum logit and the sum of exponentials
relative to it (Milakov and Gimelshein 2018, arXiv:1805.02867). The backward pass recomputes the
logits of each chunk. No array [..., V] is stored.

If V is sharded over mesh axes, all shards process their classes in parallel: classes are reshaped
to [N, S], shards and classes within a shard, and only N is sharded. Weights and logits stay on
their devices. The forward pass communicates a few numbers per token, and the backward pass
communicates the input gradient once. If D is sharded, the weights are gathered chunk by chunk.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import varying_alike
from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.core.sharding.devices.axis_types import type_spec, untyped
from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, constrain, num_shards_of
from praxis_lite.layers.base.base_layer import pad_to
from praxis_lite.layers.embedding.cross_entropy import TokenStats

# ... tokens, D input dims, V classes = N shards of S classes, C classes per shard and chunk.
# Less than any logit, but finite after subtracting a logit.
_LEAST = -0.7 * float(jnp.finfo(jnp.float32).max)


def token_stats(
    factors: Sequence[tuple[jax.Array, jax.Array]],
    bias_V: jax.Array | None,
    class_ids: jax.Array,
    *,
    chunk_size: int,
    class_dim: int = 1,
    activation: Callable[[jax.Array], jax.Array] = lambda logits: logits,
    weight_split_dims_mapping: SplitDims = None,
    activation_split_dims_mapping: SplitDims = None,
) -> TokenStats:
    """Computes statistics of the logits `activation(sum_i x_i @ w_i + bias)`.

    Differentiable once, in reverse mode, with respect to the factors and the bias.

    Args:
      factors: Pairs of inputs [..., D] and weights [D, V]; one pair for a plain softmax. Matmuls
        and bias are computed in the inputs' dtype, everything else in float32.
      bias_V: Bias [V], or None.
      class_ids: Labels, int [...].
      chunk_size: C, the number of logits per token that a device stores at a time.
      class_dim: Index of the classes dim V in the weights.
      activation: Elementwise function of the logits.
      weight_split_dims_mapping: Sharding of the first weight; V is sharded likewise in the others.
      activation_split_dims_mapping: Sharding of the logits [..., V]; the entry for V is not used.
    """
    splits = (*(weight_split_dims_mapping or ()), None, None)[:2]
    class_split, num_classes = splits[class_dim], factors[0][1].shape[class_dim]
    num_shards = num_shards_of(class_split)
    shard_size, tokens = -(-num_classes // num_shards), activation_split_dims_mapping
    chunks = _ClassChunks(
        num_classes=num_classes,
        num_shards=num_shards,
        shard_size=shard_size,
        chunk_size=min(chunk_size, shard_size),
        class_dim=class_dim,
        activation=activation,
        class_split=class_split,
        input_split=splits[1 - class_dim],
        tokens_split=None if tokens is None else tuple(tokens)[:-1],
    )
    weights = [
        chunks.lay_out_weight(chunks.by_shard(weight, class_dim), gather_D=i > 0)
        for i, (_, weight) in enumerate(factors)
    ]
    bias_NS = None if bias_V is None else chunks.by_shard(bias_V, 0)
    # JAX cannot infer a type for the loop's gradient, which sums over sharded tokens.
    return untyped(
        functools.partial(_token_stats, chunks),
        [x for x, _ in factors],
        weights,
        bias_NS,
        class_ids,
        out=type_spec(class_ids),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _ClassChunks:
    """The division of classes into shards, and of each shard into chunks."""

    num_classes: int
    num_shards: int
    shard_size: int
    chunk_size: int
    class_dim: int
    activation: Callable[[jax.Array], jax.Array]
    class_split: DimSplit
    input_split: DimSplit
    tokens_split: tuple | None

    @property
    def weight_dims(self) -> str:
        return "ndc" if self.class_dim == 1 else "ncd"

    @property
    def starts(self) -> jax.Array:
        return jnp.arange(-(-self.shard_size // self.chunk_size)) * self.chunk_size

    def by_shard(self, x: jax.Array, dim: int) -> jax.Array:
        """Reshapes dim V of `x` to S, with N as a new first dim; pads V with zeros at the end."""
        x = pad_to(x, self.num_shards * self.shard_size, dim)
        shape = (*x.shape[:dim], self.num_shards, self.shard_size, *x.shape[dim + 1 :])
        # As the first dim, N (of size 1 on a device) does not change the memory layout. With N as
        # any other dim, XLA would copy the array.
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    def lay_out_weight(self, weight: jax.Array, *, gather_D: bool) -> jax.Array:
        """Constrains the sharding of an array [N, D, ...] or [N, ..., D].

        Args:
          weight: A weight, or a chunk of it.
          gather_D: Whether to replicate D instead of sharding it over `input_split`.
        """
        input_split = None if gather_D else self.input_split
        rest = (input_split, None) if self.class_dim == 1 else (None, input_split)
        return constrain(weight, (self.class_split, *rest))

    def lay_out(self, x: jax.Array) -> jax.Array:
        """Constrains the sharding of an array [..., N] or [..., N, C]."""
        if self.tokens_split is None:
            return x
        rest = (None,) * (x.ndim - len(self.tokens_split) - 1)
        return constrain(x, (*self.tokens_split, self.class_split, *rest))

    def first(self, start: jax.Array) -> jax.Array:
        # The last chunk starts early enough not to extend beyond the end, so it repeats classes
        # from the previous chunk, which the mask from `classes` excludes.
        return jnp.minimum(start, self.shard_size - self.chunk_size)

    def cut(self, x: jax.Array, start: jax.Array, dim: int) -> jax.Array:
        """Returns the chunk of `x` that begins at index `start` of dim S."""
        return jax.lax.dynamic_slice_in_dim(x, self.first(start), self.chunk_size, axis=dim)

    def add(self, total: jax.Array, chunk: jax.Array, start: jax.Array, dim: int) -> jax.Array:
        """Adds `chunk` to `total` at `start`, in place if `total` is a loop carry."""
        chunk += self.cut(total, start, dim)
        return jax.lax.dynamic_update_slice_in_dim(total, chunk, self.first(start), axis=dim)

    def classes(self, start: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
        """Returns class ids [1, ..., N, C], and a mask of ids that are not in earlier chunks."""
        offsets_C = self.first(start) + jnp.arange(self.chunk_size, dtype=jnp.int32)
        firsts_N = jnp.arange(self.num_shards, dtype=jnp.int32) * self.shard_size
        ids_NC = firsts_N[:, None] + offsets_C[None, :]
        is_fresh_NC = (ids_NC < self.num_classes) & (offsets_C >= start)[None, :]
        shape = (1,) * (rank - 2) + ids_NC.shape
        return ids_NC.reshape(shape), is_fresh_NC.reshape(shape)

    def weight_chunks(self, inputs: list, weights: list, start: jax.Array) -> list[jax.Array]:
        """Returns a chunk of each weight, in the inputs' dtype and with D gathered."""
        chunks = []
        for i, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
            # Slice before gathering. Otherwise XLA would gather the complete weight outside the
            # loop.
            chunk = self.cut(weight, start, self.class_dim + 1).astype(x.dtype)
            chunks.append(
                self.lay_out_weight(self.lay_out_weight(chunk, gather_D=i > 0), gather_D=True)
            )
        return chunks

    def products(
        self, inputs: list, weight_chunks: list, bias_NS: jax.Array | None, start: jax.Array
    ) -> jax.Array:
        """Returns the logits before the activation, float32 [..., N, C]."""
        logits = sum(
            jnp.einsum(f"...d,{self.weight_dims}->...nc", x, chunk)
            for x, chunk in zip(inputs, weight_chunks, strict=True)
        )
        assert not isinstance(logits, int), "There must be at least one factor."
        if bias_NS is not None:
            bias_NC = self.cut(bias_NS, start, 1).astype(logits.dtype)
            logits += bias_NC.reshape((1,) * (logits.ndim - 2) + bias_NC.shape)
        return self.lay_out(logits.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_stats(
    chunks: _ClassChunks, inputs: list, weights: list, bias_NS: jax.Array | None, labels: jax.Array
) -> TokenStats:
    def step(state: tuple, start: jax.Array) -> tuple[tuple, None]:
        top, z, label_logit, logit_sum, argmax = state
        weight_chunks = chunks.weight_chunks(inputs, weights, start)
        logits = chunks.activation(chunks.products(inputs, weight_chunks, bias_NS, start))
        ids, is_fresh = chunks.classes(start, logits.ndim)
        masked = jnp.where(is_fresh, logits, _LEAST)
        chunk_top = jnp.max(masked, axis=-1)
        chunk_argmax = ids[..., 0] + jnp.argmax(masked, axis=-1).astype(jnp.int32)
        argmax = jnp.where(chunk_top > top, chunk_argmax, argmax)
        new_top = jnp.maximum(top, chunk_top)
        # z is relative to the maximum so far; a larger maximum rescales it.
        z = z * jnp.exp(top - new_top) + jnp.sum(jnp.exp(masked - new_top[..., None]), axis=-1)
        is_label = is_fresh & (ids == labels[..., None, None])
        label_logit += jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        logit_sum += jnp.sum(jnp.where(is_fresh, logits, 0.0), axis=-1)
        return tuple(map(chunks.lay_out, (new_top, z, label_logit, logit_sum, argmax))), None

    zeros = jnp.zeros((*labels.shape, chunks.num_shards), jnp.float32)
    state = (zeros + _LEAST, zeros, zeros, zeros, zeros.astype(jnp.int32))
    state = varying_alike(tuple(map(chunks.lay_out, state)), (inputs, weights, bias_NS, labels))
    state, _ = jax.lax.scan(step, state, chunks.starts)
    top, z, label_logit, logit_sum, argmax = state
    # Combine the shards: rescale their sums to the overall maximum. If several shards share it, the
    # first shard determines the argmax.
    greatest = jnp.max(top, axis=-1, keepdims=True)
    shards = jnp.arange(chunks.num_shards).reshape((1,) * labels.ndim + (-1,))
    is_first = shards == jnp.argmax(top, axis=-1, keepdims=True)
    return TokenStats(
        log_z=jnp.log(jnp.sum(z * jnp.exp(top - greatest), axis=-1)) + greatest[..., 0],
        label_logit=jnp.sum(label_logit, axis=-1),
        logit_sum=jnp.sum(logit_sum, axis=-1),
        argmax=jnp.sum(jnp.where(is_first, argmax, 0), axis=-1),
    )


def _forward(chunks, inputs, weights, bias_NS, labels) -> tuple[TokenStats, tuple]:
    stats = _token_stats(chunks, inputs, weights, bias_NS, labels)
    return stats, (inputs, weights, bias_NS, labels, stats.log_z)


def _backward(chunks: _ClassChunks, residuals: tuple, grads: TokenStats) -> tuple:
    inputs, weights, bias_NS, labels, log_z = residuals
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dims, class_dim = chunks.weight_dims, chunks.class_dim

    def step(state: tuple, start: jax.Array) -> tuple[tuple, None]:
        input_grads, weight_grads, bias_grad = state
        weight_chunks = chunks.weight_chunks(inputs, weights, start)
        with jax.named_scope(RECOMPUTED):
            products = chunks.products(inputs, weight_chunks, bias_NS, start)
        logits, activation_vjp = jax.vjp(chunks.activation, products)
        ids, is_fresh = chunks.classes(start, logits.ndim)
        is_label = ids == labels[..., None, None]
        # The derivative of log_z is the softmax, of logit_sum 1, and of label_logit 1 for the label
        # only.
        grad = grads.log_z[..., None, None] * jnp.exp(logits - log_z[..., None, None])
        grad += grads.logit_sum[..., None, None]
        grad += jnp.where(is_label, grads.label_logit[..., None, None], 0.0)
        # The last chunk may repeat classes of the previous chunk, which must not be counted twice.
        (grad,) = activation_vjp(jnp.where(is_fresh, grad, 0.0))
        grad = chunks.lay_out(grad.astype(inputs[0].dtype))
        # Keep one sum per shard, so that sums over devices are computed once, after the loop.
        input_grads = [
            total + einsum(f"...nc,{dims}->n...d", grad, chunk)
            for total, chunk in zip(input_grads, weight_chunks, strict=True)
        ]
        weight_grads = [
            chunks.add(total, einsum(f"...d,...nc->{dims}", x, grad), start, class_dim + 1)
            for total, x in zip(weight_grads, inputs, strict=True)
        ]
        if bias_grad is not None:
            over_tokens = jnp.sum(grad.astype(jnp.float32), axis=tuple(range(grad.ndim - 2)))
            bias_grad = chunks.add(bias_grad, over_tokens, start, 1)
        return (input_grads, weight_grads, bias_grad), None

    def zeros_by_shard(x: jax.Array) -> jax.Array:
        zeros = jnp.zeros((chunks.num_shards, *x.shape), jnp.float32)
        if chunks.tokens_split is None:
            return zeros
        return constrain(zeros, (chunks.class_split, *chunks.tokens_split, None))

    # The carry: float32 sums for the inputs (one per shard), the weights and the bias. Each chunk
    # adds to its own slice of the weights' sums.
    state = (
        [zeros_by_shard(x) for x in inputs],
        [
            chunks.lay_out_weight(jnp.zeros(weight.shape, jnp.float32), gather_D=i > 0)
            for i, weight in enumerate(weights)
        ],
        None if bias_NS is None else jnp.zeros(bias_NS.shape, jnp.float32),
    )
    state = varying_alike(state, (residuals, grads))
    (input_grads, weight_grads, bias_grad), _ = jax.lax.scan(step, state, chunks.starts)
    return (
        [jnp.sum(grad, 0).astype(x.dtype) for grad, x in zip(input_grads, inputs, strict=True)],
        [grad.astype(w.dtype) for grad, w in zip(weight_grads, weights, strict=True)],
        None if bias_NS is None else bias_grad.astype(bias_NS.dtype),
        None,
    )


_token_stats.defvjp(_forward, _backward)
