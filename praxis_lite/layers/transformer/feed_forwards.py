"""The feed-forward layer of a transformer block, with Pax's names and numerics."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.split_dims import SplitDims, constrain
from praxis_lite.layers.activations import ActivationFn
from praxis_lite.layers.base.activation_names import named
from praxis_lite.layers.base.base_layer import Initializer
from praxis_lite.layers.base.calls import inherit_params, require_positive
from praxis_lite.layers.base.dims import RESIDUAL, sized, splits
from praxis_lite.layers.linears import FeedForward
from praxis_lite.layers.stacking.residual_branches import ResidualBranch, split_keys
from praxis_lite.layers.stacking.tensor_parallel import (
    ShardedLayer,
    check_tensor_parallel,
    run_tensor_parallel,
    tensor_parallel_axis,
)
from praxis_lite.layers.stochastics import Dropout

# B batch, T time, D model dims, F hidden dims.


class TransformerFeedForward(ResidualBranch):
    """Computes `x + ffn(norm(x))` or a variant: [B, T, D] -> [B, T, D].

    See ResidualBranch for further settings.

    Args:
      input_dims: D.
      hidden_dims: F.
      has_bias: Whether the projections have biases.
      output_dims: Size of the outputs. If None, D, which a skip connection requires.
      activation: Name of an activation, or a function; see `activations`.
      use_gated_activation: Whether to multiply the hidden projection by a second projection, the
        gate (arXiv:2002.05202). The activation is then applied only to the gate.
      apply_padding_first: Whether to set padding to zero in the inputs, instead of in the hidden
        activations and the outputs.
      output_init: Initializer of the second projection's weight; see DotProductAttention. If None,
        that of the first projection.
      fflayer_tpl: Builds a projection from FeedForward's arguments (input dims, output dims,
        has_bias=, ...).
      relu_dropout_prob: Dropout probability of the hidden activations.
      weight_split_dims_mapping: Sharding of the first projection's weight [D, F]. The second weight
        is sharded like its transpose.
      hidden_split_dims_mapping: Sharding of the hidden activations [B, T, F].
      activation_split_dims_mapping: Sharding of the outputs [B, T, D].
      tensor_parallel: The explicit collectives to use along the mesh axis of F, a name in
        TENSOR_PARALLEL. If None, or with one token per sequence, the compiler inserts collectives.
    """

    splits = splits(
        weight=("embed", "mlp"), hidden=("batch", "length", "activation_mlp"), activation=RESIDUAL
    )
    hidden_split_dims_mapping: SplitDims

    preset_settings = {"tensor_parallel": "mlp_collectives"}

    @inherit_params(ResidualBranch)
    def __init__(
        self,
        input_dims: int,
        hidden_dims: int,
        *,
        output_dims: int | None = None,
        has_bias: bool = True,
        activation: str | ActivationFn = "relu",
        use_gated_activation: bool = False,
        apply_padding_first: bool = False,
        relu_dropout_prob: float = 0.0,
        output_init: Initializer | None = None,
        fflayer_tpl: Callable[..., Any] = FeedForward,
        tensor_parallel: str | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        check_tensor_parallel(
            self,
            tensor_parallel,
            {
                "relu_dropout_prob": relu_dropout_prob > 0.0,
                "output_dims": output_dims not in (None, input_dims),
            },
        )
        output_dims = output_dims or input_dims
        require_positive(
            self, input_dims=input_dims, hidden_dims=hidden_dims, output_dims=output_dims
        )
        super().__init__(input_dims, output_dims, rngs=rngs, **settings)
        if output_dims != input_dims and self.add_skip_connection:
            raise ConfigError(
                f"TransformerFeedForward.output_dims {output_dims} differs from input_dims "
                f"{input_dims}, so the skip connection cannot add the inputs. Omit output_dims, or "
                "set add_skip_connection=False."
            )
        D, F = self.dims(input_dims, hidden_dims)

        def projection_to_hidden(name: str, activation: Any) -> FeedForward:
            return fflayer_tpl(
                D,
                F,
                has_bias=has_bias,
                activation=activation,
                checkpoint_str=name,
                activation_split_dims_mapping=self.hidden_split_dims_mapping,
                rngs=rngs,
            )

        has_gate = use_gated_activation  # As in Pax, only the gate is activated.
        self.ffn_layer1 = projection_to_hidden("ffn1", "identity" if has_gate else activation)
        self.ffn_layer1_gate = projection_to_hidden("ffn1_gate", activation) if has_gate else None
        self.ffn_layer2 = fflayer_tpl(
            F,
            sized(D, output_dims),
            has_bias=has_bias,
            activation="identity",
            activation_split_dims_mapping=self.activation_split_dims_mapping,
            **({} if output_init is None else {"weight_init": output_init}),
            rngs=rngs,
        )
        self.relu_dropout = Dropout(relu_dropout_prob)
        self.apply_padding_first = apply_padding_first
        self.tensor_parallel, self.features_split = tensor_parallel, F.split

    def __call__(
        self,
        inputs: jax.Array,
        *,
        paddings: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the outputs [B, T, D].

        Args:
          inputs: [B, T, D].
          paddings: [B, T]; 1.0 for padding, whose branch outputs are set to zero.
          segment_ids: Not used by this layer; other feed-forward layers use them.
          key: Random key for dropout. If None, nothing is dropped.
        """
        relu_key, residual_key, droppath_key = split_keys(key, 3)

        inputs = _without_padding(inputs, paddings if self.apply_padding_first else None)
        outputs = self._with_branch(
            inputs,
            lambda x: named(self._branch(x, paddings, relu_key), "ffn2"),
            residual_key,
            droppath_key,
            key,
        )
        return constrain(outputs, self.activation_split_dims_mapping)

    def _branch(self, x: jax.Array, paddings: jax.Array | None, key: jax.Array | None) -> jax.Array:
        """Returns the branch's output, which is added to the inputs."""
        # In decoding, with one token per sequence, tensor parallelism is left to the compiler.
        axis = tensor_parallel_axis(self, self.features_split) if x.shape[1] > 1 else None
        if axis is not None:
            return run_tensor_parallel(
                ShardedLayer(
                    self,
                    lambda layer, x, rows: layer._branch(x, rows.get("paddings"), None),
                    self.activation_split_dims_mapping,
                    reads_sequences=False,
                    output="ffn_layer2",
                ),
                axis,
                x,
                {"paddings": paddings},
            )
        paddings = None if self.apply_padding_first else paddings
        hidden_BTF = self.ffn_layer1(x)
        if self.ffn_layer1_gate is not None:
            hidden_BTF = hidden_BTF * self.ffn_layer1_gate(x)
        hidden_BTF = self.relu_dropout(_without_padding(hidden_BTF, paddings), key)
        return _without_padding(self.ffn_layer2(hidden_BTF), paddings)


def _without_padding(x: jax.Array, paddings: jax.Array | None) -> jax.Array:
    return x if paddings is None else x * (1.0 - paddings).astype(x.dtype)[..., None]
