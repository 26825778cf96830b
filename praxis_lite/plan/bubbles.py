"""How long the stages of a pipeline idle."""

from typing import Any

from flax import nnx

from praxis_lite.layers import Pipeline
from praxis_lite.layers.stacking.pipeline_schedules import Schedule


def bubble_share(model: Any, rows: int) -> float | None:
    """Returns the share of ticks in which a stage idles, the largest of a model's pipelines.

    Args:
      model: of a task; of others than NNX's nothing is known.
      rows: of a global batch.

    Returns:
      None without a pipeline.
    """
    make = getattr(model, "abstract_module", None)
    if make is None:
        return None
    shares = [
        Schedule(
            one.num_stages, one.num_microbatches or rows // one.microbatch_size,
            one.circular_repeat,
        ).bubble_share
        for _, one in nnx.iter_modules(make()) if isinstance(one, Pipeline)
    ]
    return max(shares, default=None)
