"""Learning rates as functions of the number of updates made: Pax's schedules under its settings.

Each function here returns a schedule: a function of a count (int, NumPy integer or traced int32)
that returns a float32 scalar. A Learner's `learning_rate` takes it, or any of optax's:

    learning_rate=fdl.Config(linear_rampup_cosine_decay,
                             warmup_steps=500, decay_start=501, decay_end=20_000, max=3e-4)

Names are Pax's in snake case. Pax's rate is `learning_rate * schedule(step)`; so is that of
`scaled(learning_rate, schedule)`. Cosine with restarts is `optax.sgdr_schedule`.

Where two steps are the same (`decay_start == decay_end`), the rate jumps there.
"""

from praxis_lite.schedules.pieces import cycle_schedule, piecewise_constant, piecewise_schedule
from praxis_lite.schedules.shapes import (
    Schedule,
    constant,
    continuous_schedule,
    cosine,
    delayed_cosine,
    exponential,
    linear,
    polynomial,
    scaled,
)
from praxis_lite.schedules.warmups import (
    linear_rampup_cosine_decay,
    linear_rampup_exponential_decay,
    linear_rampup_piecewise_constant,
    linear_rampup_polynomial_decay,
    linear_rampup_sqrt_decay,
    sqrt_decay,
    transformer,
    warmup_stable_decay,
)

__all__ = [
    "Schedule",
    "constant",
    "continuous_schedule",
    "cosine",
    "cycle_schedule",
    "delayed_cosine",
    "exponential",
    "linear",
    "linear_rampup_cosine_decay",
    "linear_rampup_exponential_decay",
    "linear_rampup_piecewise_constant",
    "linear_rampup_polynomial_decay",
    "linear_rampup_sqrt_decay",
    "piecewise_constant",
    "piecewise_schedule",
    "polynomial",
    "scaled",
    "sqrt_decay",
    "transformer",
    "warmup_stable_decay",
]
