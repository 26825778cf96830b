"""A task's decoder with other settings, for a call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.task import Task
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.sampling import Greedy, Sample


def changed_decoder(
    task: Task, config: fdl.Config, decoder: Decoder | None, settings: Mapping[str, Any]
) -> Decoder:
    """Returns another decoder, or a task's own, with some settings replaced.

    Args:
      config: of the task.
      decoder: in place of the task's.

    Raises:
      ConfigError: the task has no decoder, or the decoder no such setting.
    """
    if not isinstance(task.decoder, Decoder):
        raise ConfigError(f"{type(task).__name__} has no decoder, so it takes no settings.")
    if decoder is None:
        # Not the task's: its tokenizer has put tokens into that.
        decoder = config.decoder
        if isinstance(decoder, fdl.Buildable):
            decoder = fdl.build(decoder)
    known = [field.name for field in dataclasses.fields(decoder)]
    if type(decoder) is Greedy and any(hasattr(Sample, name) for name in settings.keys() - known):
        # The settings of draws are Sample's, which does all else as Greedy does.
        decoder = Sample(**{name: getattr(decoder, name) for name in known})
        known = [field.name for field in dataclasses.fields(decoder)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{type(decoder).__name__} has no setting {name!r}; it has {', '.join(known)}."
                f"{did_you_mean(name, known)} Another decoder, such as Sample, is given as "
                "decoder=Sample(...)."
            )
    return dataclasses.replace(decoder, **settings)
