"""What `TrainedModel.generate` takes: prompts in Python, and another decoder or its settings."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import fiddle as fdl
import numpy as np

from praxis_lite.decode import Decoder
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.inputs import InMemory
from praxis_lite.task import Task

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


def prompt_batch(task: Task, prompts: Prompts) -> InMemory:
    """Returns a pipeline of one batch: texts with the end of text before each, or token ids.

    Raises:
      ConfigError: the task continues no prompts, or a prompt is empty.
    """
    wanted = {"ids", "prefix_lengths", "weights"}
    tokenizer = getattr(task, "tokenizer", None)
    if set(task.required_decode_inputs) != wanted or tokenizer is None:
        raise ConfigError(
            f"{type(task).__name__} continues no prompts. generate is for language models; "
            "decode(NAME) gives what --mode=decode writes, predict(ARRAYS) the model's outputs."
        )
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    rows = [_ids(one, tokenizer) for one in given]
    if not rows or not all(map(len, rows)):
        raise ConfigError(
            f"generate was given {prompts!a:.100}; give a prompt, or a list of prompts "
            "with a token each at least."
        )
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, prompt in zip(ids, rows, strict=True):
        row[: len(prompt)] = prompt
    arrays = {
        "ids": ids,
        "prefix_lengths": np.array([len(one) for one in rows], np.int32),
        "weights": np.ones(len(rows), np.float32),
    }
    return InMemory(arrays, batch_size=len(rows), shuffle=False)


def _ids(prompt: str | Sequence[int], tokenizer: Any) -> np.ndarray:
    if isinstance(prompt, str):
        start = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        return np.array([*start, *tokenizer.encode(prompt)], np.int32)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(
            f"generate was given a prompt of {ids.dtype}{list(ids.shape)}; give a text, or the "
            "token ids of one prompt, int[length]."
        )
    return ids


def with_decoder(
    task: Task, config: fdl.Config, decoder: Decoder | None, settings: Mapping[str, Any]
) -> Task:
    """Returns the task with another decoder, or with other settings of its own.

    Args:
      config: of the task.
      decoder: in place of the task's.

    Raises:
      ConfigError: the task has no decoder, or the decoder no such setting.
    """
    if not isinstance(getattr(task, "decoder", None), Decoder):
        raise ConfigError(f"{type(task).__name__} has no decoder, so it takes no settings.")
    config = copy.deepcopy(config)
    if decoder is None:
        # Not the task's: its tokenizer has put tokens into that.
        decoder = fdl.build(config.decoder) if config.decoder is not None else task.decoder
    known = [field.name for field in dataclasses.fields(decoder)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{type(decoder).__name__} has no setting {name!r}; it has {', '.join(known)}."
                f"{did_you_mean(name, known)} Another decoder, such as Sample, is given as "
                "decoder=Sample(...)."
            )
    config.decoder = dataclasses.replace(decoder, **settings)
    return fdl.build(config)
