"""Optimizers that optax does not have, or has with other numerics than Pax's.

A Learner's `optimizer` is one of them, or one of optax's: `fdl.Partial(optax.sgd, momentum=0.9)`.
For an optimizer class of Pax take, with Pax's defaults where optax's are others,

    Sgd, ShardedSgd              optax.sgd
    Adagrad                      optax.adagrad, eps=1e-10 (optax: 1e-7)
    ShardedAdagrad               the same, eps=1e-12, initial_accumulator_value=1e-12 (optax: 0.1)
    Adam                         adam
    Adam, sharded_adam=False     optax.adam, eps=1e-6 (optax: 1e-8)
    Lion                         lion
    Lamb, Lars                   optax.lamb, optax.lars
    ShardedAdafactor             adafactor

and `regularized` around it for l1_regularizer_weight, l2_regularizer_weight, skip_lp_1d_vectors,
decoupled_weight_decay and SKIP_LP_REGULARIZATION. Clipping of gradients and the EMA are the
Learner's, and its learning_rate is Pax's learning_rate times lr_schedule (`schedules.scaled`).

What a Learner takes besides: `DynamicLossScale` for float16, `VariationalNoise`.

Later than Pax are `soap`, Muon (optax's, with `muon_matrices`), and schedule-free AdamW (optax's;
evaluation takes its averages, see `evaluation_params`).
"""

from praxis_lite.core.learner.path_masks import collected_patterns, path_mask
from praxis_lite.core.learner.schedule_free import evaluation_params
from praxis_lite.optimizers.adafactor import AdafactorState, adafactor
from praxis_lite.optimizers.adam import AdamState, adam
from praxis_lite.optimizers.lion import LionState, lion
from praxis_lite.optimizers.loss_scaling import DynamicLossScale
from praxis_lite.optimizers.low_precision_slots import (
    LowPrecisionSlotsState,
    low_precision_slots,
)
from praxis_lite.optimizers.muon import muon_matrices
from praxis_lite.optimizers.regularized import regularized
from praxis_lite.optimizers.soap import SoapState, scale_by_soap, soap
from praxis_lite.optimizers.variational_noise import VariationalNoise

__all__ = [
    "AdafactorState",
    "AdamState",
    "DynamicLossScale",
    "LionState",
    "LowPrecisionSlotsState",
    "SoapState",
    "VariationalNoise",
    "adafactor",
    "adam",
    "collected_patterns",
    "evaluation_params",
    "lion",
    "low_precision_slots",
    "muon_matrices",
    "path_mask",
    "regularized",
    "scale_by_soap",
    "soap",
]
