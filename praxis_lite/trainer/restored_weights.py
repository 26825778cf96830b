"""Restores weights from a checkpoint for evaluation and decoding."""

import logging
from typing import Any

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.verified_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.job_history import metrics_by_step

__all__ = ("restored_weights",)


def restored_weights(
    partitioner: Partitioner, job_dir: JobDir, step: Step, use_ema: bool
) -> tuple[int, Any]:
    """Restores the weights from a checkpoint, without optimizer slots.

    Args:
      partitioner: Partitioner of the task, with its mesh.
      job_dir: The job's directory.
      step: The checkpoint's step, "best", or None for the newest checkpoint.
      use_ema: Whether to use the exponential moving averages of the weights.

    Returns:
      The checkpoint's step, and the weights on the mesh.
    """
    layout = partitioner.layout
    opt_states = partitioner.task.learner.eval_opt_states(layout.shapes.opt_states, use_ema=use_ema)
    with Checkpoints(
        job_dir.checkpoints,
        note=_log.warning,
        evaluated=lambda: metrics_by_step(job_dir),
    ) as checkpoints:
        restored = checkpoints.restore(
            layout, partitioner.mesh, step=step, opt_states_keys=tuple(opt_states)
        )
    averages = ", averaged (EMA)" if opt_states else ""
    _log.info("restored the weights of step %d%s", restored.step, averages)
    return restored.step, partitioner.eval_mdl_vars(restored.state, use_ema=use_ema)


_log = logging.getLogger(__name__)
