"""Estimates the seconds and bytes of a step by formulas, without compiling it.

The formulas are those of the scaling book (https://jax-ml.github.io/scaling-book, "Sharded
matrices" and "Training"): 6 flops per weight and token, weights gathered twice and gradients
scattered once per step (FSDP), activations gathered and scattered around each half of a block
(tensor parallelism). They rank the candidates of a search; plans come from compiled programs.
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
# checkpoint_policy -> (activations that it saves per block and token, in multiples of model_dims;
# in multiples of hidden_dims; the share of forward matmuls that the backward pass repeats).
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
      parameters: all weights.
      num_layers, model_dims, hidden_dims, vocab_size: as in TransformerLm.
      slots: elements that the optimizer stores per weight (Adam: 2).
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
    """How a step is distributed.

    Attributes:
      replica, data, mdl: devices along the mesh's axes; weights are replicated over `replica`.
      mdl_splits: the dim of activations that `mdl` splits: "rows", "features" (tensor parallelism)
        or "time" (context parallelism).
      gathers_weights: whether weights are split over `data` and gathered (FSDP).
      policy: a name in POLICIES.
      micro_batches: gradient accumulation steps.
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
    def tensor_size(self) -> int:
        """Devices that features are split over (tensor parallelism)."""
        return self.mdl if self.mdl_splits == "features" else 1


def step_seconds(shape: Shape, layout: Layout, chip: Chip) -> float:
    """Returns the seconds of a train step: matmuls, or gathers of weights if those take longer."""
    tokens = _tokens_per_device(shape, layout) * layout.micro_batches
    *_, repeated = POLICIES[layout.policy]
    flops = (6 + 2 * repeated) * shape.parameters * tokens
    attention = shape.num_layers * shape.model_dims * shape.tokens_per_row / 2
    flops += (12 + 4 * repeated) * attention * tokens
    # A complete model reaches 0.75 of the peak by the compiler's cycles.
    matmuls = flops / chip.peak() / (0.75 * FITTED.cycles)
    num_links = 2 if chip.torus_dims else 1
    bandwidth = num_links * chip.link_bandwidth * FITTED.link
    weights = _bytes_for_weights(shape, layout) / bandwidth
    activations = _bytes_for_activations(shape, layout, repeated) / bandwidth
    # Gathers of weights overlap with matmuls; matmuls wait for those of activations.
    update = (2 + 2 * shape.slots + 2) * F32 * _weights_per_device(shape, layout)
    return max(matmuls, weights) + activations + update / chip.hbm_bandwidth


def peak_bytes(shape: Shape, layout: Layout) -> float:
    """Returns the bytes of a device in a train step: state, gradients, activations, logits."""
    weights = _weights_per_device(shape, layout)
    per_model, per_hidden, _ = POLICIES[layout.policy]
    tokens = _tokens_per_device(shape, layout)
    features = layout.tensor_size
    saved = per_model * shape.model_dims + per_hidden * shape.hidden_dims
    # `mdl` splits a device's tokens between blocks, and features within them.
    activations = shape.num_layers * tokens * BF16 * saved
    one_layer = BF16 * shape.parameters / max(shape.num_layers, 1) / features
    block = tokens * BF16 * (8 * shape.model_dims + 4 * shape.hidden_dims / features)
    logits = tokens * (F32 + BF16) * shape.vocab_size / features
    gradients = (F32 if layout.micro_batches > 1 else BF16) * weights
    return weights * F32 * (1 + shape.slots) + gradients + activations + max(
        block + 2 * one_layer, logits
    )


def _tokens_per_device(shape: Shape, layout: Layout) -> float:
    """Returns the tokens per device of a micro-batch, whose rows are padded to the devices."""
    mdl_over_rows = layout.mdl if layout.mdl_splits == "rows" else 1
    devices = layout.replica * layout.data * mdl_over_rows
    rows = math.ceil(shape.rows / layout.micro_batches / devices)
    return rows * shape.tokens_per_row / (layout.mdl // mdl_over_rows)


def _weights_per_device(shape: Shape, layout: Layout) -> float:
    if layout.gathers_weights:
        return shape.parameters / (layout.mdl * layout.data)
    return shape.parameters / layout.tensor_size


def _bytes_for_weights(shape: Shape, layout: Layout) -> float:
    """Returns the bytes that a device sends for weights and gradients."""
    group = layout.data * layout.mdl // layout.tensor_size
    weight_bytes = BF16 * shape.parameters / layout.tensor_size
    if not layout.gathers_weights:
        group *= layout.replica
        return 2 * weight_bytes * (group - 1) / group
    gathered = 3 * weight_bytes * layout.micro_batches * (group - 1) / group
    return gathered + 2 * F32 * _weights_per_device(shape, layout) * (layout.replica > 1)


def _bytes_for_activations(shape: Shape, layout: Layout, repeated: float) -> float:
    """Returns the bytes that a device sends for activations along `mdl`."""
    if layout.mdl_splits == "rows":
        return 0.0
    tokens = _tokens_per_device(shape, layout)
    if layout.mdl_splits == "features":
        tokens *= layout.mdl  # A layer's features are gathered for all tokens of the group.
    sent = tokens * shape.model_dims * BF16 * (layout.mdl - 1) / layout.mdl
    # Forward, backward, and repeated forward. Features: a gather and a scatter around each half of
    # a block. Time: queries, keys, values and outputs are exchanged for a split of heads (Ulysses).
    return 4 * (2 + repeated) * sent * shape.num_layers * layout.micro_batches


def bubble_share(model: Any, rows: int) -> float | None:
    """Returns the largest share of ticks in which a stage of a model's pipelines idles.

    Args:
      model: a task's model.
      rows: of a global batch.

    Returns:
      None without a pipeline, and for models that are not NNX modules.
    """
    module = model.abstract_module()
    if module is None:
        return None
    pipelines = [item for _, item in nnx.compat.iter_modules(module) if isinstance(item, Pipeline)]
    return max((_bubble_share(pipeline, rows) for pipeline in pipelines), default=None)


def _bubble_share(pipeline: Pipeline, rows: int) -> float:
    number = pipeline.num_microbatches or -(-rows // pipeline.microbatch_size)
    schedule = Schedule(pipeline.num_stages, number, pipeline.circular_repeat)
    if pipeline.split_backward:  # Forward twice, then both gradients, take as long each.
        return schedule.split_bubble_share(forward=2.0)
    return schedule.bubble_share
