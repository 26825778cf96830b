"""Checks of optimizers' settings, where the optimizer is made: before anything compiles."""

from praxis_lite.errors import ConfigError


def require_decay_rates(optimizer: str, **rates: float) -> None:
    """Checks the rates at which moments decay.

    Raises:
      ConfigError: one is not in [0, 1); names the optimizer and the setting.
    """
    for name, rate in rates.items():
        if not _is_number(rate) or not 0 <= rate < 1:
            raise ConfigError(f"{optimizer}: {name} is {rate!r}; wanted is a number in [0, 1).")


def require_not_negative(optimizer: str, **settings: float) -> None:
    """Checks settings of which 0 means none.

    Raises:
      ConfigError: one is negative, or no number; names the optimizer and the setting.
    """
    for name, value in settings.items():
        if not _is_number(value) or not value >= 0:
            raise ConfigError(
                f"{optimizer}: {name} is {value!r}; wanted is a positive number, or 0 for none."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
