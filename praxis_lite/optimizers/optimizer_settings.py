"""Settings that optimizers share: their checks, before anything compiles, and what follows them."""

import optax

from praxis_lite.core.errors import is_number, require


def require_decay_rates(optimizer: str, **rates: float) -> None:
    """Raises a ConfigError if a rate at which moments decay is not in [0, 1)."""
    for name, rate in rates.items():
        is_right = is_number(rate) and 0 <= rate < 1
        require(is_right, f"{optimizer}: {name}", rate, "a number in [0, 1)")


def require_not_negative(optimizer: str, **settings: float) -> None:
    """Raises a ConfigError if a setting that is off at 0 is negative or not a number."""
    for name, value in settings.items():
        is_right = is_number(value) and value >= 0
        require(is_right, f"{optimizer}: {name}", value, "a positive number, or 0 to leave it out")


def require_positive(optimizer: str, **settings: float) -> None:
    """As `require_not_negative`, of settings that cannot be off."""
    for name, value in settings.items():
        is_right = is_number(value) and value > 0
        require(is_right, f"{optimizer}: {name}", value, "a positive number")


def stepped(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    clip_threshold: float,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Returns an optimizer as Pax makes it of a direction: clipped, plus decay, times the rate.

    Args:
      clip_threshold: the most that the root mean square of a tensor's update may be, before the
        learning rate; 0: no clipping.
      weight_decay: times the weights, all of them, added after the clipping.
    """
    parts = [direction]
    if clip_threshold:
        parts.append(optax.clip_by_block_rms(clip_threshold))
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
