"""Seconds and bytes of a step by formulas alone, before anything is compiled.

The formulas are those of the scaling book (https://jax-ml.github.io/scaling-book, "Sharded
matrices" and "Training"): 6 flops per weight and token, weights gathered twice and gradients
scattered once per step (FSDP), activations gathered and scattered around each half of a block
(tensor parallelism). They order candidates of a search; a plan is made by compiling.
"""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx

from praxis_lite.layers.stacking.pipelines import Pipeline
from praxis_lite.layers.stacking.pipelining.schedules import Schedule
from praxis_lite.tools.plan.chips import Chip
from praxis_lite.tools.plan.costs import FITTED, Efficiencies

BF16, F32 = 2, 4
# What a policy keeps of a block, in elements per token: model dims, and hidden dims; and the share
# of the forward pass's matmuls that the backward pass computes again.
POLICIES: dict[str, tuple[float, float, float]] = {
    "save_nothing": (1, 0, 1.0),
    "save_qkv_out_proj_separate": (5, 0, 0.7),
    "save_dot_for_mlperf_200b": (6, 0, 0.65),
    "save_dot_except_logits": (7, 2, 0.05),
    "save_everything": (24, 8, 0.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer as far as formulas need it.

    Attributes:
      parameters: all weights.
      num_layers, model_dims, hidden_dims, vocab_size: its sizes.
      slots: elements that the optimizer keeps per weight (Adam: 2).
      rows, tokens_per_row: of a global batch.
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
    """How a step is laid out.

    Attributes:
      replica, data, mdl: devices along the mesh's axes; replica holds whole copies.
      mdl_splits: of activations `mdl` splits "rows", "features" (tensor parallelism) or "time"
        (context parallelism).
      gathers_weights: weights are split over `data` and gathered (FSDP).
      policy: a name in POLICIES.
      micro_batches: that a batch is cut into, one after the other.
    """

    replica: int
    data: int
    mdl: int
    mdl_splits: str = "rows"
    gathers_weights: bool = True
    policy: str = "save_nothing"
    micro_batches: int = 1

    @property
    def num_devices(self) -> int:
        return self.replica * self.data * self.mdl

    @property
    def of_features(self) -> int:
        """Devices that features are split over."""
        return self.mdl if self.mdl_splits == "features" else 1


def step_seconds(
    shape: Shape, layout: Layout, chip: Chip, efficiencies: Efficiencies = FITTED
) -> float:
    """Returns the seconds of a train step: matmuls, or the wire where that takes longer."""
    tokens = _tokens_per_device(shape, layout) * layout.micro_batches
    *_, again = POLICIES[layout.policy]
    flops = (6 + 2 * again) * shape.parameters * tokens
    attended = shape.num_layers * shape.model_dims * shape.tokens_per_row / 2
    flops += (12 + 4 * again) * attended * tokens
    matmuls = flops / chip.peak() / _usual(efficiencies)
    weights = _weight_gathers(shape, layout) / _bandwidth(chip, efficiencies)
    sent = _feature_gathers(shape, layout, again) + _heads_exchanged(shape, layout, again)
    activations = sent / _bandwidth(chip, efficiencies)
    # Gathers of weights hide behind matmuls, what is sent of activations stands between them.
    update = (2 + 2 * shape.slots + 2) * F32 * _weights_per_device(shape, layout)
    return max(matmuls, weights) + activations + update / chip.hbm_bandwidth


def peak_bytes(shape: Shape, layout: Layout) -> float:
    """Returns the bytes of a device in a train step: state, gradients, activations, logits."""
    weights = _weights_per_device(shape, layout)
    per_model, per_hidden, _ = POLICIES[layout.policy]
    tokens = _tokens_per_device(shape, layout)
    features = layout.of_features
    kept = per_model * shape.model_dims + per_hidden * shape.hidden_dims
    # `mdl` splits a device's tokens between blocks, and features within them.
    activations = shape.num_layers * tokens * BF16 * kept
    one_layer = BF16 * shape.parameters / max(shape.num_layers, 1) / features
    block = tokens * BF16 * (8 * shape.model_dims + 4 * shape.hidden_dims / features)
    logits = tokens * (F32 + BF16) * shape.vocab_size / features
    gradients = (F32 if layout.micro_batches > 1 else BF16) * weights
    return weights * F32 * (1 + shape.slots) + gradients + activations + max(
        block + 2 * one_layer, logits
    )


def _usual(efficiencies: Efficiencies) -> float:
    # Of the peak that a whole model's matmuls reach: the compiler's cycles are 0.75 of it.
    return 0.75 * efficiencies.cycles


def _bandwidth(chip: Chip, efficiencies: Efficiencies) -> float:
    links = 2 if chip.torus_dims else 1
    return links * chip.link_bandwidth * efficiencies.link


def _tokens_per_device(shape: Shape, layout: Layout) -> float:
    """Returns the tokens of a micro-batch that a device computes; rows are filled up."""
    of_rows = layout.mdl if layout.mdl_splits == "rows" else 1
    rows = math.ceil(shape.rows / layout.micro_batches / (layout.replica * layout.data * of_rows))
    return rows * shape.tokens_per_row / (layout.mdl // of_rows)


def _weights_per_device(shape: Shape, layout: Layout) -> float:
    over = layout.mdl * (layout.data if layout.gathers_weights else 1)
    if not layout.gathers_weights and layout.mdl_splits != "features":
        over = 1
    return shape.parameters / over


def _weight_gathers(shape: Shape, layout: Layout) -> float:
    """Returns the bytes that a device sends for weights and gradients."""
    among = layout.data * layout.mdl // layout.of_features
    bytes_of = BF16 * shape.parameters / layout.of_features
    if not layout.gathers_weights:
        among *= layout.replica
        return 2 * bytes_of * (among - 1) / among
    gathered = 3 * bytes_of * layout.micro_batches * (among - 1) / among
    return gathered + 2 * F32 * _weights_per_device(shape, layout) * (layout.replica > 1)


def _feature_gathers(shape: Shape, layout: Layout, again: float) -> float:
    """Returns the bytes that a device sends for activations along `mdl`."""
    if layout.of_features == 1:
        return 0.0
    group = _tokens_per_device(shape, layout) * layout.mdl
    each = group * shape.model_dims * BF16 * (layout.mdl - 1) / layout.mdl
    # A gather and a scatter around each half of a block, forward, backward, and forward again.
    passes = 2 + again
    return 4 * passes * each * shape.num_layers * layout.micro_batches


def _heads_exchanged(shape: Shape, layout: Layout, again: float) -> float:
    """Returns the bytes that a device sends where time is split: for heads, and back (Ulysses)."""
    if layout.mdl_splits != "time":
        return 0.0
    each = _tokens_per_device(shape, layout) * shape.model_dims * BF16
    each *= (layout.mdl - 1) / layout.mdl
    # Queries, keys, values and outputs, forward, backward, and forward again.
    return 4 * (2 + again) * each * shape.num_layers * layout.micro_batches


def bubble_share(model: Any, rows: int) -> float | None:
    """Returns the share of ticks in which a stage idles, the largest of a model's pipelines.

    Args:
      model: of a task; of others than NNX's nothing is known.
      rows: of a global batch.

    Returns:
      None without a pipeline.
    """
    module = model.abstract_module()
    if module is None:
        return None
    pipelines = [item for _, item in nnx.compat.iter_modules(module) if isinstance(item, Pipeline)]
    return max(map(functools.partial(_bubbles, rows=rows), pipelines), default=None)


def _bubbles(pipeline: Pipeline, rows: int) -> float:
    number = pipeline.num_microbatches or -(-rows // pipeline.microbatch_size)
    schedule = Schedule(pipeline.num_stages, number, pipeline.circular_repeat)
    if pipeline.split_backward:  # Forward twice, then both gradients, take as long each.
        return schedule.split_bubble_share(forward=2.0)
    return schedule.bubble_share
