"""Checks of settings that optimizers share, and the steps that follow an optimizer's direction."""

import optax

from praxis_lite.core.errors import is_number, require


def require_decay_rates(optimizer: str, **rates: float) -> None:
    """Raises a ConfigError if a decay rate of moments is not in [0, 1)."""
    for name, rate in rates.items():
        is_valid = is_number(rate) and 0 <= rate < 1
        require(is_valid, f"{optimizer}: {name}", rate, "a number in [0, 1)")


def require_not_negative(optimizer: str, **settings: float) -> None:
    """Raises a ConfigError if a setting, which 0 disables, is negative or not a number."""
    for name, value in settings.items():
        is_valid = is_number(value) and value >= 0
        require(is_valid, f"{optimizer}: {name}", value, "a positive number, or 0 to disable it")


def require_positive(optimizer: str, **settings: float) -> None:
    """Raises a ConfigError if a setting, which cannot be disabled, is not a positive number."""
    for name, value in settings.items():
        is_valid = is_number(value) and value > 0
        require(is_valid, f"{optimizer}: {name}", value, "a positive number")


def build_clipped_optimizer(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    clip_threshold: float,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Returns an optimizer from a direction, as Pax does: clip, add weight decay, apply the rate.

    Args:
      direction: The transformation from gradients to directions.
      learning_rate: A number, or a schedule of the number of updates.
      clip_threshold: The maximum root mean square of a tensor's update before the learning rate is
        applied; 0: no clipping.
      weight_decay: The factor of the weights, all of them, that is added after clipping.
    """
    parts = [direction]
    if clip_threshold:
        parts.append(optax.clip_by_block_rms(clip_threshold))
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
