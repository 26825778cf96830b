"""Softmaxes over classes and their cross-entropy, with Pax's names and numerics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import require, require_choice
from praxis_lite.core.sharding.split_dims import SplitDims, constrain
from praxis_lite.layers.activations import ActivationFn, activation_fn, soft_cap
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, xavier
from praxis_lite.layers.base.calls import inherit_params, require_floating, require_positive
from praxis_lite.layers.base.dims import RESIDUAL, SplitSetting, split_of, splits
from praxis_lite.layers.base.result_types import einsum
from praxis_lite.layers.base.variables import AuxLoss
from praxis_lite.layers.embedding.chunked_cross_entropy import token_stats
from praxis_lite.layers.embedding.cross_entropy import (
    TokenStats,
    cross_entropy,
    stats_of_logits,
)
from praxis_lite.layers.embedding.embeddings import LOOKUP_STYLES, constrain_embeddings, lookup
from praxis_lite.layers.linears import Bias, FeedForward

# D input dims, V classes.


class FullSoftmax(BaseLayer):
    """Computes float32 logits [..., V] from inputs [..., D], and the cross-entropy.

    Args:
      num_classes: V.
      input_dims: D.
      has_bias: Whether to add a bias [V] (Pax's feed_forward_tpl.has_bias).
      bias_init: Initial value of the bias.
      soft_cap_logits: cap in cap * tanh(logits / cap). If 0 or None, logits are not capped.
      z_loss_weight: Weight of mean(log_z^2), which is added to the auxiliary losses.
      label_smoothing_prob: Fraction of a label's probability that is distributed over the other
        V - 1 classes.
      label_smoothing_apply_for_eval: Whether to smooth labels in evaluation (without a key) as
        well.
      scale_before_logits: Whether to divide the inputs by sqrt(D).
      chunk_size: Number of logits per token that a device computes at a time. `compute_loss` then
        returns no logits. If None, all logits are stored. In Pax, this is the chunk size along the
        sequence.
      weight_init: Initializer of the weight.
      feed_forward_tpl: Template of the projection; called with the sizes, `has_bias`, `activation`,
        the initializers, the sharding and `rngs`.
      weight_split_dims_mapping: Sharding of [D, V].
      activation_split_dims_mapping: Sharding of the logits, [..., V].
    """

    splits = splits(weight=("embed", "vocab"), activation=("batch", "length", "activation_vocab"))

    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        has_bias: bool = True,
        bias_init: float = 0.0,
        soft_cap_logits: float | None = 0.0,
        z_loss_weight: float = 0.0,
        label_smoothing_prob: float = 0.0,
        label_smoothing_apply_for_eval: bool = True,
        scale_before_logits: bool = False,
        chunk_size: int | None = None,
        weight_init: Initializer = xavier,
        feed_forward_tpl: Callable[..., Any] = FeedForward,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, num_classes=num_classes, input_dims=input_dims)
        if chunk_size is not None:
            require_positive(self, chunk_size=chunk_size)
        name = type(self).__name__
        cap = soft_cap_logits or 0.0
        require(cap >= 0.0, f"{name}.soft_cap_logits", cap, "a positive cap, or 0 for none")
        require(
            z_loss_weight >= 0.0, f"{name}.z_loss_weight", z_loss_weight, "0 or a positive number"
        )
        require(
            0.0 <= label_smoothing_prob < 1.0 and (num_classes > 1 or not label_smoothing_prob),
            f"{name}.label_smoothing_prob",
            label_smoothing_prob,
            f"0, or between 0 and 1 with at least 2 classes (num_classes is {num_classes})",
        )
        self.num_classes, self.input_dims = num_classes, input_dims
        self.soft_cap_logits, self.z_loss_weight = soft_cap_logits, z_loss_weight
        self.label_smoothing_prob = label_smoothing_prob
        self.label_smoothing_apply_for_eval = label_smoothing_apply_for_eval
        self.scale = input_dims**-0.5 if scale_before_logits else 1.0
        self.chunk_size = chunk_size
        self.aux_loss = AuxLoss(jnp.zeros(())) if z_loss_weight else None
        self._project(
            feed_forward_tpl,
            has_bias=has_bias,
            bias_init=bias_init,
            weight_init=weight_init,
            rngs=rngs,
        )

    def _project(
        self,
        feed_forward_tpl: Callable[..., Any],
        *,
        has_bias: bool,
        bias_init: float,
        weight_init: Initializer,
        rngs: nnx.Rngs,
    ) -> None:
        """Creates the weights."""
        dims = self.dims(self.input_dims, self.num_classes)
        self.weight_split_dims_mapping = split_of(dims)
        self.logits_ffn = feed_forward_tpl(
            *dims,
            activation="identity",
            activation_split_dims_mapping=self.activation_split_dims_mapping,
            has_bias=has_bias,
            bias_init=bias_init,
            weight_init=weight_init,
            rngs=rngs,
        )

    def _projected(self, inputs: jax.Array) -> jax.Array:
        """Returns the projected inputs [..., V], in the inputs' dtype, for `_activated`."""
        return self.logits_ffn(inputs)

    def _token_stats(self, inputs: jax.Array, class_ids: jax.Array) -> TokenStats:
        """Returns the statistics of the logits without storing all logits."""
        assert self.chunk_size is not None
        bias = self.logits_ffn.bias
        return token_stats(
            self.logits_ffn.linear.factors(inputs),
            None if bias is None else bias.b[...],
            class_ids,
            chunk_size=self.chunk_size,
            activation=self._activated,
            weight_split_dims_mapping=self.weight_split_dims_mapping,
            activation_split_dims_mapping=self.activation_split_dims_mapping,
        )

    def _gathered(self, inputs: jax.Array) -> jax.Array:
        """Constrains the inputs to the sharding of the logits, except for the last dim.

        Inputs that are sharded over more axes are then gathered before the matmul, and their
        gradient is scattered. Otherwise XLA might gather the gradient of the logits.
        """
        split = self.activation_split_dims_mapping
        return inputs if split is None else constrain(inputs, tuple(split)[: inputs.ndim - 1])

    def _activated(self, logits: jax.Array) -> jax.Array:
        return soft_cap(logits, self.soft_cap_logits or 0.0)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V] for inputs [..., D], like Pax's get_logits."""
        inputs = self._gathered(inputs) * self.scale
        logits = self._activated(self._projected(inputs).astype(jnp.float32))
        return constrain(logits, self.activation_split_dims_mapping)

    def compute_loss(
        self,
        inputs: jax.Array,
        class_ids: jax.Array | None,
        class_weights: jax.Array,
        *,
        class_probabilities: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the cross-entropy with labels, or with a distribution over the classes.

        Args:
          inputs: [..., D].
          class_ids: Labels, int [...] or (as in Pax) [..., 1]. May be None if class_probabilities
            is passed.
          class_weights: Weight of each token, with the shape of class_ids.
          class_probabilities: Target distribution [..., V]; requires storing all logits.
          key: Random key in training, otherwise None. See label_smoothing_apply_for_eval.

        Returns:
          A dict with per_example_xent [...] in nats, per_example_argmax int [...], total_xent,
          total_weight and avg_xent. It also contains accuracy if class_ids are passed; the weighted
          z_loss, which is also assigned to `aux_loss`, if z_loss_weight is set; and logits and
          log_probs, float32 [..., V], if chunk_size is None.

        Raises:
          ValueError: Both class_ids and class_probabilities are None.
        """
        if class_ids is None and class_probabilities is None:
            raise ValueError("compute_loss requires class_ids or class_probabilities.")
        if class_ids is not None and class_ids.ndim == inputs.ndim:
            class_ids = jnp.squeeze(class_ids, axis=-1)
        if class_weights.ndim == inputs.ndim:
            class_weights = jnp.squeeze(class_weights, axis=-1)
        weights = class_weights.astype(jnp.float32)
        total_weight = jnp.sum(weights)
        outputs = {"total_weight": total_weight}
        # With a chunk_size, only statistics per token are computed. A target distribution requires
        # all log-probs.
        if self.chunk_size is None or class_probabilities is not None:
            logits = self(inputs)
            stats = stats_of_logits(logits, class_ids)
            outputs |= {"logits": logits, "log_probs": logits - stats.log_z[..., None]}
        else:
            assert class_ids is not None
            stats = self._token_stats(self._gathered(inputs) * self.scale, class_ids)
        if class_probabilities is not None:
            target = jax.lax.stop_gradient(class_probabilities.astype(jnp.float32))
            xent = -jnp.sum(outputs["log_probs"] * target, axis=-1)
        else:
            assert class_ids is not None
            is_smooth = key is not None or self.label_smoothing_apply_for_eval
            smoothing = self.label_smoothing_prob if is_smooth else 0.0
            xent = cross_entropy(stats, class_ids, self.num_classes, smoothing)

        total_xent = jnp.sum(xent * weights)
        outputs |= {
            "per_example_xent": xent,
            "per_example_argmax": stats.argmax,
            "total_xent": total_xent,
            "avg_xent": total_xent / (total_weight + 1e-6),
        }
        divisor = jnp.maximum(total_weight, 1e-6)  # A batch may consist only of padding.
        if class_ids is not None:
            outputs["accuracy"] = jnp.sum((stats.argmax == class_ids) * weights) / divisor
        if self.aux_loss is not None:
            z_loss = self.z_loss_weight * jnp.sum(jnp.square(stats.log_z) * weights) / divisor
            self.aux_loss.set_value(z_loss)
            outputs["z_loss"] = z_loss
        return outputs


class SharedEmbeddingSoftmax(FullSoftmax):
    """A FullSoftmax whose weight [D, V] also embeds ids (Press and Wolf, arXiv:1608.05859).

    Args:
      num_classes: V.
      input_dims: D.
      lookup_style: "index" or "matmul"; see `embeddings.lookup`.
      scale_sqrt_depth: Whether to multiply the embeddings by sqrt(D).
      fprop_dtype: Dtype of the embeddings.
      lookup_split_dims_mapping: Sharding of the embeddings, [B, T, D]; Pax's
        emb_out_split_dims_mapping.
      settings: Settings of FullSoftmax.
    """

    splits = FullSoftmax.splits | splits(lookup=RESIDUAL)
    lookup_split_dims_mapping: SplitDims

    @inherit_params(FullSoftmax)
    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        lookup_style: str = "index",
        scale_sqrt_depth: bool = False,
        fprop_dtype: jnp.dtype = jnp.float32,
        **settings: Any,
    ):
        require_choice(f"{type(self).__name__}.lookup_style", lookup_style, LOOKUP_STYLES)
        require_floating(self, fprop_dtype=fprop_dtype)
        super().__init__(num_classes, input_dims, **settings)
        self.lookup_style = lookup_style
        self.emb_scale = input_dims**0.5 if scale_sqrt_depth else 1.0
        self.fprop_dtype = fprop_dtype

    def _tables(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """Returns pairs ([V, d], [d, D] or None) whose products add up to the embedding table."""
        return self.logits_ffn.linear.column_factors()

    def emb_lookup(self, ids: jax.Array) -> jax.Array:
        """Returns embeddings [B, T, D] for ids [B, T]."""
        embs: float | jax.Array = 0.0
        dim_split, class_split = (*(self.weight_split_dims_mapping or ()), None, None)[:2]
        for table, into_D in self._tables():
            # The rank of a low-rank adapter is not sharded.
            table_split = (class_split, dim_split if into_D is None else None)
            rows = lookup(
                table,
                ids,
                table_split,
                self.lookup_style,
                self.fprop_dtype,
                self.lookup_split_dims_mapping,
            )
            if into_D is not None:
                rows = einsum("...d,de->...e", rows, into_D.astype(self.fprop_dtype))
            embs += rows
        table_split = (class_split, dim_split)
        assert isinstance(embs, jax.Array), "There must be at least one table."
        embs = embs * self.emb_scale
        return constrain_embeddings(embs, self.lookup_split_dims_mapping, table_split)


class NClassMajorSharedEmbeddingSoftmax(SharedEmbeddingSoftmax):
    """A SharedEmbeddingSoftmax whose weight `w` is [V, D].

    As in Pax, `weight_split_dims_mapping` is still for [D, V], so that the two softmaxes are
    interchangeable.

    Args:
      num_classes: V.
      input_dims: D.
      use_bias: Pax's name for has_bias in this class.
      activation: Function of the logits, applied before the cap.
      settings: Settings of SharedEmbeddingSoftmax.
    """

    @inherit_params(
        SharedEmbeddingSoftmax, exclude=("has_bias", "scale_before_logits", "feed_forward_tpl")
    )
    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        use_bias: bool = True,
        activation: str | ActivationFn = "identity",
        **settings: Any,
    ):
        activation_fn(activation, self)
        super().__init__(num_classes, input_dims, has_bias=use_bias, **settings)
        self.activation = activation

    def _project(
        self,
        feed_forward_tpl: Any,
        *,
        has_bias: bool,
        bias_init: float,
        weight_init: Initializer,
        rngs: nnx.Rngs,
    ) -> None:
        D, V = self.dims(self.input_dims, self.num_classes)
        self.split_VD = (V.split, D.split)
        self.w = self.weight((V, D), init=weight_init, rngs=rngs)
        self.bias = Bias(V, bias_init=bias_init, rngs=rngs) if has_bias else None

    def _projected(self, inputs: jax.Array) -> jax.Array:
        logits = einsum("...d,vd->...v", inputs, self.w[...].astype(inputs.dtype))
        logits = constrain(logits, self.activation_split_dims_mapping)
        return logits if self.bias is None else self.bias(logits)

    def _activated(self, logits: jax.Array) -> jax.Array:
        return super()._activated(activation_fn(self.activation, self)(logits))

    def _token_stats(self, inputs: jax.Array, class_ids: jax.Array) -> TokenStats:
        assert self.chunk_size is not None
        return token_stats(
            [(inputs, self.w[...])],
            None if self.bias is None else self.bias.b[...],
            class_ids,
            chunk_size=self.chunk_size,
            class_dim=0,
            activation=self._activated,
            weight_split_dims_mapping=self.split_VD,
            activation_split_dims_mapping=self.activation_split_dims_mapping,
        )

    def _tables(self) -> list[tuple[jax.Array, jax.Array | None]]:
        return [(self.w[...], None)]
