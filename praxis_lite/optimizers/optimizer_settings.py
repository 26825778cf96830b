"""Checks optimizer settings, and builds the clipping, decay and scaling shared by Adam and Lion."""

import optax

from praxis_lite.core.errors import is_number, require


def require_decay_rates(optimizer: str, **rates: float) -> None:
    """Raises ConfigError if a decay rate for moments is not in [0, 1)."""
    for name, rate in rates.items():
        is_valid = is_number(rate) and 0 <= rate < 1
        require(is_valid, f"{optimizer}: {name}", rate, "a number in [0, 1)")


def require_not_negative(optimizer: str, **settings: float) -> None:
    """Raises ConfigError if a setting is negative or not a number; 0 disables the setting."""
    for name, value in settings.items():
        is_valid = is_number(value) and value >= 0
        require(is_valid, f"{optimizer}: {name}", value, "a positive number, or 0 to disable it")


def require_positive(optimizer: str, **settings: float) -> None:
    """Raises ConfigError if a setting is not a positive number."""
    for name, value in settings.items():
        is_valid = is_number(value) and value > 0
        require(is_valid, f"{optimizer}: {name}", value, "a positive number")


def build_clipped_optimizer(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    clip_threshold: float,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Builds an optimizer that clips updates, decays weights and scales by the learning rate.

    The order of these steps is the same as in Pax.

    Args:
      direction: Transformation from gradients to directions.
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      clip_threshold: Maximum root mean square of a tensor's update before the learning rate is
        applied, or 0 for no clipping.
      weight_decay: Weight decay factor for all weights. The decay is added after clipping.
    """
    parts = [direction]
    if clip_threshold:
        parts.append(optax.clip_by_block_rms(clip_threshold))
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
