"""Every block of docs/training.md builds, and its training step traces on a mesh."""

import re
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
import pytest

from praxis_lite import (
    BestCheckpoints,
    CheckpointLoadingRules,
    EarlyStopping,
    EvaluationSettings,
    LossSpikeSettings,
    SaveSettings,
    StopSettings,
    optimizers,
)
from praxis_lite.core import (
    AuxiliaryOptimizer,
    Partitioner,
    make_mesh,
)
from praxis_lite.experiments import lm
from praxis_lite.layers import QuantizationRule, quantized
from praxis_lite.optimizers import DynamicLossScale, VariationalNoise, schedules

PAGE = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = {
    "fdl": fdl, "jax": jax, "jnp": jnp, "optax": optax,
    "optimizers": optimizers, "schedules": schedules,
    "AuxiliaryOptimizer": AuxiliaryOptimizer, "BestCheckpoints": BestCheckpoints,
    "CheckpointLoadingRules": CheckpointLoadingRules, "DynamicLossScale": DynamicLossScale,
    "EarlyStopping": EarlyStopping, "EvaluationSettings": EvaluationSettings,
    "LossSpikeSettings": LossSpikeSettings, "SaveSettings": SaveSettings,
    "StopSettings": StopSettings, "QuantizationRule": QuantizationRule,
    "VariationalNoise": VariationalNoise, "quantized": quantized,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:60])
def test_the_block_builds_and_its_step_traces(block):
    if "quantized" in block:
        pytest.importorskip("qwix")
    config = lm.Synthetic().config()
    names = {"task": config.task, "learner": config.task.learner, "run": config.run, **NAMES}
    before = str(config)
    exec(block, names)
    # A block that configures nothing (a misspelt name, say) would trace as well.
    assert str(config) != before
    job = fdl.build(config)
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    partitioner.train_step.trace(job.datasets["train"].element_spec())
