"""Changes settings of a task's decoder for a single call."""

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
    """Returns a decoder with some settings replaced.

    Args:
      task: The task.
      config: The task's config.
      decoder: The decoder to change, or None for the task's decoder.
      settings: Values of the decoder's fields to replace.

    Raises:
      ConfigError: The task has no decoder, or the decoder has no such setting.
    """
    if not isinstance(task.decoder, Decoder):
        raise ConfigError(f"{type(task).__name__} has no decoder whose settings could be changed.")
    if decoder is None:
        # Build the decoder from the config, because task.decoder already has the tokenizer's ids.
        decoder = config.decoder
        if isinstance(decoder, fdl.Buildable):
            decoder = fdl.build(decoder)
    known = [field.name for field in dataclasses.fields(decoder)]
    if type(decoder) is Greedy and any(hasattr(Sample, name) for name in settings.keys() - known):
        # Sampling settings need `Sample`, which otherwise behaves like `Greedy`.
        decoder = Sample(**{name: getattr(decoder, name) for name in known})
        known = [field.name for field in dataclasses.fields(decoder)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{type(decoder).__name__} has no setting {name!r}; it has {', '.join(known)}."
                f"{did_you_mean(name, known)} To use a different decoder, pass it, for example as "
                "decoder=Sample(...)."
            )
    return dataclasses.replace(decoder, **settings)
