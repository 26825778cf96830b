"""Optimizers that optax lacks, or whose numerics differ between optax and Pax.

The `optimizer` of a Learner is either one of these or an optax optimizer, such as
`fdl.Partial(optax.sgd, momentum=0.9)`. Pax's optimizer classes correspond to the following
functions. Settings are listed where Pax's defaults differ from optax's:

    Sgd, ShardedSgd              optax.sgd
    Adagrad                      optax.adagrad, eps=1e-10 (optax: 1e-7)
    ShardedAdagrad               optax.adagrad, eps=1e-12,
                                 initial_accumulator_value=1e-12 (optax: 0.1)
    Adam                         adam
    Adam, sharded_adam=False     optax.adam, eps=1e-6 (optax: 1e-8)
    Lion                         lion
    Lamb, Lars                   optax.lamb, optax.lars
    ShardedAdafactor             adafactor

Wrap an optimizer in `regularized` for l1_regularizer_weight, l2_regularizer_weight,
skip_lp_1d_vectors, decoupled_weight_decay and SKIP_LP_REGULARIZATION. The Learner itself clips
gradients and maintains the EMA. The Learner's learning_rate is Pax's learning_rate times
lr_schedule (`schedules.scaled`).

A Learner also accepts `DynamicLossScale`, for float16, and `VariationalNoise`.

There are also optimizers that Pax does not have: `soap`, Muon (from optax, with `muon_matrices`),
and schedule-free AdamW (from optax; evaluation uses averaged weights, see `evaluation_params`).
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
