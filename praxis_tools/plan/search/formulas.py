"""Estimates the time and memory of a step with formulas, without compiling it.

The formulas are from the scaling book (https://jax-ml.github.io/scaling-book, "Sharded matrices"
and "Training"): 6 flops per weight and token; FSDP gathers weights twice and scatters gradients
once per step; tensor parallelism gathers and scatters activations around each half of a block.
They are only used to rank the candidates of a search; plans are derived from compiled programs.
"""

import dataclasses
import math
from typing import Any

from flax import nnx

from praxis_lite.layers.stacking.pipelines import Pipeline
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Schedule
from praxis_tools.plan.chips import Chip
from praxis_tools.plan.costs import FITTED

BF16, F32 = 2, 4
# Maps each checkpoint_policy to (multiple of model_dims saved, multiple of hidden_dims saved,
# fraction of forward matmuls recomputed). Saved activations are per block and token.
POLICIES: dict[str, tuple[float, float, float]] = {
    "save_nothing": (1, 0, 1.0),
    "save_qkv_out_proj_separate": (5, 0, 0.7),
    "save_dot_for_mlperf_200b": (6, 0, 0.65),
    "save_dot_except_logits": (7, 2, 0.05),
    "save_everything": (24, 8, 0.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a transformer and its batch.

    Attributes:
      parameters: Number of weights.
      num_layers: Number of transformer blocks.
      model_dims: Width of the residual stream.
      hidden_dims: Width of the feed-forward layers.
      vocab_size: Number of token ids.
      slots: Number of elements that the optimizer stores per weight (Adam: 2).
      rows: Number of rows in a global batch.
      tokens_per_row: Number of tokens in each row.
    """

    parameters: int
    num_layers: int
    model_dims: int
    hidden_dims: int
    vocab_size: int
    slots: float
    rows: int
    tokens_per_row: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is distributed over devices.

    Attributes:
      replica: Number of devices along the axis over which weights are replicated.
      data: Number of devices along the axis that splits rows and, with FSDP, weights.
      mdl: Number of devices along the model axis.
      mdl_splits: Activation dim that `mdl` splits: "rows", "features" (tensor parallelism) or
        "time" (context parallelism).
      gathers_weights: Whether weights are split over `data` and gathered for each layer (FSDP).
      policy: Remat policy, a key of POLICIES.
      accumulation_steps: Number of gradient accumulation steps.
    """

    replica: int
    data: int
    mdl: int
    mdl_splits: str = "rows"
    gathers_weights: bool = True
    policy: str = "save_nothing"
    accumulation_steps: int = 1

    @property
    def num_devices(self) -> int:
        return self.replica * self.data * self.mdl

    @property
    def tensor_size(self) -> int:
        """Number of devices over which features are split (tensor parallelism)."""
        return self.mdl if self.mdl_splits == "features" else 1


def step_seconds(shape: Shape, layout: Layout, chip: Chip) -> float:
    """Estimates the time of a train step in seconds.

    Weight transfers overlap with matmuls, so only the slower of the two is counted. Activation
    transfers do not overlap, because matmuls wait for them.
    """
    tokens = _tokens_per_device(shape, layout) * layout.accumulation_steps
    *_, recomputed = POLICIES[layout.policy]
    # For each parameter and token: 2 flops forwards, 4 backwards, and up to 2 for recomputation.
    flops = (6 + 2 * recomputed) * shape.parameters * tokens
    # With a causal mask, a token attends to half of its row on average.
    attention = shape.num_layers * shape.model_dims * shape.tokens_per_row / 2
    flops += (12 + 4 * recomputed) * attention * tokens
    # Complete models reach 75% of the peak, according to the compiler's cycle estimates.
    matmul_seconds = flops / chip.peak() / (0.75 * FITTED.cycles)
    num_links = 2 if chip.torus_dims else 1
    bandwidth = num_links * chip.link_bandwidth * FITTED.link
    weight_seconds = _bytes_for_weights(shape, layout) / bandwidth
    activation_seconds = _bytes_for_activations(shape, layout, recomputed) / bandwidth
    # Each weight, slot and gradient is read once and written once.
    update_bytes = (2 + 2 * shape.slots + 2) * F32 * _weights_per_device(shape, layout)
    update_seconds = update_bytes / chip.hbm_bandwidth
    return max(matmul_seconds, weight_seconds) + activation_seconds + update_seconds


def peak_bytes(shape: Shape, layout: Layout) -> float:
    """Estimates the bytes per device for state, gradients, activations and logits."""
    weights = _weights_per_device(shape, layout)
    per_model, per_hidden, _ = POLICIES[layout.policy]
    tokens = _tokens_per_device(shape, layout)
    features = layout.tensor_size
    saved = per_model * shape.model_dims + per_hidden * shape.hidden_dims
    # `mdl` splits tokens between blocks, and features within blocks.
    activations = shape.num_layers * tokens * BF16 * saved
    one_layer = BF16 * shape.parameters / max(shape.num_layers, 1) / features
    block = tokens * BF16 * (8 * shape.model_dims + 4 * shape.hidden_dims / features)
    logits = tokens * (F32 + BF16) * shape.vocab_size / features
    gradients = (F32 if layout.accumulation_steps > 1 else BF16) * weights
    return (
        weights * F32 * (1 + shape.slots)
        + gradients
        + activations
        + max(block + 2 * one_layer, logits)
    )


def _tokens_per_device(shape: Shape, layout: Layout) -> float:
    """Returns the number of tokens per device in a microbatch, including padding rows."""
    mdl_over_rows = layout.mdl if layout.mdl_splits == "rows" else 1
    devices = layout.replica * layout.data * mdl_over_rows
    rows = math.ceil(shape.rows / layout.accumulation_steps / devices)
    return rows * shape.tokens_per_row / (layout.mdl // mdl_over_rows)


def _weights_per_device(shape: Shape, layout: Layout) -> float:
    if layout.gathers_weights:
        return shape.parameters / (layout.mdl * layout.data)
    return shape.parameters / layout.tensor_size


def _bytes_for_weights(shape: Shape, layout: Layout) -> float:
    """Returns the bytes that each device sends to gather weights and to sum gradients."""
    group = layout.data * layout.mdl // layout.tensor_size
    weight_bytes = BF16 * shape.parameters / layout.tensor_size
    if not layout.gathers_weights:
        group *= layout.replica
        # An all-reduce sends the weights twice: a reduce-scatter and an all-gather.
        return 2 * weight_bytes * (group - 1) / group
    # For each microbatch, weights are gathered in both passes, and gradients are scattered once.
    gathered = 3 * weight_bytes * layout.accumulation_steps * (group - 1) / group
    return gathered + 2 * F32 * _weights_per_device(shape, layout) * (layout.replica > 1)


def _bytes_for_activations(shape: Shape, layout: Layout, recomputed: float) -> float:
    """Returns the bytes of activations that each device sends along `mdl`."""
    if layout.mdl_splits == "rows":
        return 0.0
    tokens = _tokens_per_device(shape, layout)
    if layout.mdl_splits == "features":
        tokens *= layout.mdl  # Features are gathered for all tokens of the group.
    sent = tokens * shape.model_dims * BF16 * (layout.mdl - 1) / layout.mdl
    # Each block has four transfers in the forward pass, in the backward pass and in the recomputed
    # forward pass. For "features", they are a gather and a scatter around each half of the block.
    # For "time", they reshard queries, keys, values and outputs between time and heads (Ulysses).
    return 4 * (2 + recomputed) * sent * shape.num_layers * layout.accumulation_steps


def bubble_share(model: Any, rows: int) -> float | None:
    """Returns the fraction of ticks in which a pipeline stage is idle.

    Args:
      model: Model of a task.
      rows: Number of rows in a global batch.

    Returns:
      The largest fraction among all pipelines in the model, or None if the model has no pipeline or
      is not an NNX module.
    """
    module = model.abstract_module()
    if module is None:
        return None
    return max(
        (
            _bubble_share(layer, rows)
            for _, layer in nnx.compat.iter_modules(module)
            if isinstance(layer, Pipeline)
        ),
        default=None,
    )


def _bubble_share(pipeline: Pipeline, rows: int) -> float:
    num_microbatches = pipeline.num_microbatches_of(rows)
    schedule = Schedule(pipeline.num_stages, num_microbatches, pipeline.circular_repeat)
    if pipeline.split_backward:
        # The backward pass recomputes the forward pass, so there are two forward ticks for each
        # tick that computes input gradients and each tick that computes weight gradients.
        return schedule.split_bubble_share(forward=2.0)
    return schedule.bubble_share
