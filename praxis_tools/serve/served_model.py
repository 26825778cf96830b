"""The served model, with its tokenizer and limits, and the engine that runs the model."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.decode.continuous_batching import ContinuousBatching
from praxis_lite.decode.sampling_by_row import SampleByRow
from praxis_lite.inputs.text.length_classes import all_length_classes
from praxis_lite.inputs.text.token_ids import checked_int
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.trainer.decoding.user_prompts import check_language_model, prompt_ids
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.engine import STEPS_BETWEEN_CHECKS, Engine
from praxis_tools.serve.requests import COMPLETION_TOKENS, MAX_LOGPROBS, Request

# Default maximum number of tokens per row. The cache of longer rows may not fit in memory.
DEFAULT_MAX_LENGTH = 4096


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The properties of a served language model that are needed to process requests.

    Attributes:
      name: Name of the model in requests.
      tokenizer: Tokenizer of the task.
      num_ids: Size of the vocabulary, or None if it is unknown.
      max_length: Maximum total number of tokens in a prompt and its answer.
      eos_ids: Tokens that end an answer.
      stop_strings: The job's stop strings, which end an answer in addition to those of a request.
    """

    name: str
    tokenizer: Tokenizer
    num_ids: int | None
    max_length: int
    eos_ids: Collection[int]
    stop_strings: Sequence[str] = ()

    def tokenize(self, request: Request) -> list[np.ndarray]:
        """Returns the token ids of each prompt.

        This can be slow, so do not call it in the event loop. It may be called from any thread.

        Raises:
          ApiError: The request is for a different model, or a prompt is empty, is too long,
            contains ids outside of the vocabulary, or is invalid for the chat template, or the
            tokenizer cannot encode a stop string.
        """
        if request.model != self.name:
            raise ApiError(
                404,
                f"There is no model {request.model!a:.80}; this server serves {self.name}.",
                param="model",
                code="model_not_found",
            )
        param = "messages" if request.is_chat else "prompt"
        try:
            prompts = [
                prompt_ids(prompt, self.tokenizer, param, self.num_ids)
                for prompt in request.prompts
            ]
        except ConfigError as error:
            raise ApiError(400, str(error), param=param, code="invalid_value") from None
        for ids in prompts:
            self._check(ids, request, param)
        try:
            for stop in request.stop:
                self.tokenizer.encode(stop, False)
        except ConfigError as error:
            raise ApiError(400, str(error), param="stop", code="invalid_value") from None
        return prompts

    def max_new_tokens(self, num_ids: int, request: Request) -> int:
        """Returns the maximum number of tokens to generate after a prompt of `num_ids` ids."""
        room = self.max_length - num_ids
        if request.max_tokens is None:
            return room if request.is_chat else min(room, COMPLETION_TOKENS)
        return min(room, request.max_tokens)

    def _check(self, ids: np.ndarray, request: Request, param: str) -> None:
        if not len(ids):
            raise ApiError(
                400,
                f"{param} is empty; expected at least one token.",
                param=param,
                code="invalid_value",
            )
        if self.num_ids is not None and int(ids.max()) >= self.num_ids:
            raise ApiError(
                400,
                f"{param} has the token {int(ids.max())}, but the model only has "
                f"{self.num_ids} tokens.",
                param=param,
                code="invalid_value",
            )
        num_new = request.max_tokens or 1
        if len(ids) + num_new > self.max_length:
            raise ApiError(
                400,
                f"{param} and the answer have {len(ids)} + {num_new} = {len(ids) + num_new} tokens "
                f"in total, but this server's limit is {self.max_length}. Shorten the prompt or "
                "request fewer tokens.",
                param=param,
                code="context_length_exceeded",
            )


def create_served_model(
    partitioner: Partitioner,
    mdl_vars: Any,
    name: str,
    *,
    max_length: int | None,
    num_rows: int,
    max_waiting: int,
) -> tuple[ServedModel, Engine]:
    """Returns a served model and the engine that decodes it, without compiling anything.

    Args:
      partitioner: Partitioner of the model.
      mdl_vars: Model variables. They are donated if they have to be converted for decoding.
      name: Name of the model in requests.
      max_length: Maximum total number of tokens in a prompt and its answer. The default is the
        model's number of positions, but at most DEFAULT_MAX_LENGTH.
      num_rows: Number of answers that are decoded at the same time.
      max_waiting: Number of answers that may wait in the queue.

    Raises:
      ConfigError: The model is not a causal language model with a tokenizer, the model has too few
        positions, or several processes are running.
    """
    task = partitioner.task
    check_language_model(task, "praxis serve")
    num_positions = task.num_ids().get("segment_pos")
    if max_length is None:
        max_length = min(num_positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    limit = {} if num_positions is None else {"maximum": num_positions}
    max_length = checked_int(max_length, "--max_length", 2, **limit)
    checked_int(num_rows, "--num_rows", 1)
    checked_int(max_waiting, "--max_queue", 1)
    # Only the ends of answers and settings that affect speed are taken from the job. Each request
    # has its own sampling settings.
    settings = {
        name: getattr(task.decoder, name, getattr(SampleByRow, name))
        for name in (
            "num_speculative_tokens",
            "prompt_lookup_max",
            "prefill_chunk_size",
            "num_cached_prefixes",
        )
    }
    # Each row has room for max_length tokens, independent of the prompt's length.
    decoder = SampleByRow(
        max_decode_steps=max_length - 1,
        seqlen=max_length,
        eos_id=task.decoder.eos_id,
        num_likeliest=min(MAX_LOGPROBS, task.num_ids().get("ids", MAX_LOGPROBS)),
        num_kept_steps=STEPS_BETWEEN_CHECKS * (1 + settings["num_speculative_tokens"]),
        **settings,
    )
    lengths = all_length_classes(max_length)
    batching = ContinuousBatching(
        decoder,
        task.module,
        num_rows,
        lengths,
        wrap=functools.partial(partitioner.with_mdl_vars, has_splits=True),
        compiler_options=partitioner.decode_options,
        advice="Reduce --num_rows or --max_length.",
    )
    model = ServedModel(
        name,
        task.tokenizer,
        task.num_ids().get("ids"),
        max_length,
        decoder.eos_ids,
        task.decoder.stop_strings,
    )
    mdl_vars = partitioner.for_decoding(mdl_vars, donates=True)
    return model, Engine(batching, mdl_vars, lengths, max_waiting)
