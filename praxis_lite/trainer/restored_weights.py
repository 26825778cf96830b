"""The weights of a checkpoint, to evaluate and decode with."""

from typing import Any

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.job_history import metrics_by_step

__all__ = ("restored_weights",)


def restored_weights(
    partitioner: Partitioner, job_dir: JobDir, step: int | str | None, use_ema: bool
) -> tuple[int, Any]:
    """Returns a checkpoint's step, and the weights to evaluate with; no slots are kept."""
    layout = partitioner.layout
    read = partitioner.task.learner.eval_opt_states(layout.shapes.opt_states, use_ema=use_ema)
    with Checkpoints(
        job_dir.checkpoints, note=lambda line: print(line, flush=True),
        evaluated=lambda: metrics_by_step(job_dir),
    ) as saved:
        restored = saved.restore(layout, partitioner.mesh, step=step, opt_states_keys=tuple(read))
    averages = ", averaged over the steps before it" if read else ""
    print(f"restored the weights of step {restored.step}{averages}", flush=True)
    return restored.step, partitioner.eval_mdl_vars(restored.state, use_ema=use_ema)
