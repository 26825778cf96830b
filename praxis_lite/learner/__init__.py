"""Gradients into weights: optimizers, groups of weights, schedules, slots, averages.

Never sees a model's layers, a mesh or a loop.
"""

from praxis_lite.learner.gradients import GradientLimits
from praxis_lite.learner.learner import Learner
from praxis_lite.learner.loss_scaling import DynamicLossScale
from praxis_lite.learner.optimizer_groups import AuxiliaryOptimizer
from praxis_lite.learner.regularization import VariationalNoise

__all__ = [
    "AuxiliaryOptimizer",
    "DynamicLossScale",
    "GradientLimits",
    "Learner",
    "VariationalNoise",
]
