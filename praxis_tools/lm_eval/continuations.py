"""Generates continuations up to a stop string, for lm_eval's `generate_until` requests."""

import functools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.decode.continuous_batching import ContinuousBatching, Prompt
from praxis_lite.decode.sampling import Greedy, Sample
from praxis_lite.decode.stop_strings import (
    ContinuationText,
    continuation_text,
    for_tokenizer,
)
from praxis_lite.inputs.text.length_classes import length_class
from praxis_lite.inputs.text.token_ids import token_ids
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_tools.lm_eval.evaluated_model import EvaluatedModel
from praxis_tools.lm_eval.progress import Progress

# After this many steps, the devices wait while the host fetches the tokens and searches for stop
# strings. With a larger value, the devices wait less often but decode more unused tokens.
STEPS_PER_FETCH = 8
# Maps generation arguments of transformers to arguments of Greedy and Sample.
GREEDY_SETTINGS = {"repetition_penalty": "repetition_penalty"}
SAMPLE_SETTINGS = {"temperature": "temperature", "top_k": "k", "top_p": "p", "min_p": "min_p"}
_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A context to continue.

    Attributes:
      context: Token ids of the context.
      decoder: Decoder with the request's settings.
      until: Strings that end the continuation.
    """

    context: Sequence[int]
    decoder: Greedy
    until: tuple[str, ...]


class Continuations:
    """Continues contexts on the model's mesh with continuous batching.

    Two functions are compiled per decoder and length class.

    Args:
      model: The evaluated model.
      num_rows: Number of contexts that are decoded at the same time.
      seed: Seed for sampling.
      settings: Arguments passed to all decoders, such as num_cached_prefixes.
    """

    def __init__(self, model: EvaluatedModel, num_rows: int, seed: int, **settings: Any):
        self._model, self._num_rows, self._seed = model, num_rows, seed
        self._settings = settings
        self._batchings: dict[tuple[Greedy, int], ContinuousBatching] = {}

    def decoder(self, settings: Mapping[str, Any], max_new_tokens: int) -> Greedy:
        """Returns the decoder for a request's generation arguments.

        Args:
          settings: Generation arguments as in transformers: do_sample, temperature, top_k, ...
          max_new_tokens: Maximum number of tokens to generate.

        Returns:
          A `Sample` if the request samples with a positive temperature, otherwise a `Greedy`.

        Raises:
          ConfigError: An argument is unknown or has an invalid value.
        """
        known = {"do_sample", *GREEDY_SETTINGS, *SAMPLE_SETTINGS}
        for name in settings.keys() - known:
            raise ConfigError(
                f"generation_kwargs has {name}={settings[name]!r}; expected only until, "
                f"max_gen_toks, {', '.join(sorted(known))}.{did_you_mean(name, known)} Remove it "
                "from the task or from --gen_kwargs."
            )
        arguments: dict[str, Any] = {"max_decode_steps": max_new_tokens, **self._settings}
        arguments |= {
            ours: settings[theirs] for theirs, ours in GREEDY_SETTINGS.items() if theirs in settings
        }
        kind = Greedy
        if settings.get("do_sample") and settings.get("temperature"):
            kind = Sample
            # transformers samples from all tokens unless top_k is set; Sample's default is k=40.
            arguments |= {"k": 0} | {
                ours: settings[theirs]
                for theirs, ours in SAMPLE_SETTINGS.items()
                if theirs in settings
            }
        decoder = for_tokenizer(kind(**arguments), self._model.tokenizer)
        assert isinstance(decoder, Greedy)  # `for_tokenizer` preserves the class.
        return decoder

    def generate(self, requests: Sequence[Request]) -> list[str]:
        """Returns the continuation of each request, up to its first stop string.

        If the context and the new tokens together exceed max_length, the first ids of the context
        are removed, with a warning.

        Raises:
          ConfigError: A context is empty, or max_gen_toks leaves no room for a context.
        """
        contexts, tokenizer = list[np.ndarray](), self._model.tokenizer
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            context, length = self._truncate_context(request)
            contexts.append(context)
            groups[length, request.decoder, request.until].append(index)
        texts = [""] * len(requests)
        progress = Progress("continued", len(requests))
        mdl_vars = self._model.partitioner.for_decoding(self._model.mdl_vars)
        # Start with the longest contexts, so that running out of memory is detected immediately.
        for length, decoder, until in sorted(groups, key=lambda group: -group[0]):
            indices = groups[length, decoder, until]
            stop_strings = (*until, *decoder.stop_strings)
            new_ids: list[list[int]] = [[] for _ in indices]
            batching = self._batching(decoder, length)
            stream = batching.stream(
                mdl_vars,
                (self._prompt(index, contexts[index], length) for index in indices),
                num_steps=STEPS_PER_FETCH,
                text_of=functools.partial(_continuation_text, tokenizer, stop_strings),
            )
            for new in stream:
                new_ids[new.index].extend(new.ids.tolist())
                progress.add(int(new.done))
            assert batching.latest is not None  # Set by `stream`.
            _log.info(batching.latest.summary(f"contexts of up to {length} ids"))
            for index, ids in zip(indices, new_ids, strict=True):
                text = continuation_text(tokenizer, contexts[index], ids, stop_strings)
                texts[index] = text.text
        return texts

    def _truncate_context(self, request: Request) -> tuple[np.ndarray, int]:
        """Returns a context, truncated to leave room for new tokens, and its padded length."""
        num_new = request.decoder.max_decode_steps
        max_context = self._model.max_length - num_new
        if max_context < 1:
            raise ConfigError(
                f"max_gen_toks is {num_new}; expected less than max_length, "
                f"{self._model.max_length}, so that there is room for a context. Lower it with "
                "--gen_kwargs max_gen_toks=NUMBER."
            )
        if not request.context:
            raise ConfigError(
                "A generate_until request has an empty context, and the tokenizer adds no token "
                "before it. Set add_bos_token=True, or fix the task."
            )
        vocab_size = self._model.partitioner.task.num_ids().get("ids")
        ids = token_ids(request.context, "A context", vocab_size, ndim=1)
        if len(ids) > max_context:
            _log.warning(
                "a context of %d ids and %d new ids exceed max_length, %d: the first %d ids are "
                "removed",
                len(ids),
                num_new,
                self._model.max_length,
                len(ids) - max_context,
            )
        ids = ids[-max_context:]
        return ids, length_class(len(ids), max_context)

    def _prompt(self, index: int, context: np.ndarray, length: int) -> Prompt:
        """Returns a padded context with a random key that depends on the request's index."""
        ids = np.pad(context, (0, length - len(context)))
        key = jax.random.fold_in(jax.random.key(self._seed), index)
        return Prompt(ids, len(context), key)

    def _batching(self, decoder: Greedy, length: int) -> ContinuousBatching:
        if (decoder, length) not in self._batchings:
            partitioner = self._model.partitioner
            self._batchings[decoder, length] = ContinuousBatching(
                decoder,
                partitioner.task.module,
                self._num_rows,
                length,
                wrap=functools.partial(partitioner.with_mdl_vars, has_splits=True),
                compiler_options=partitioner.decode_options,
            )
        return self._batchings[decoder, length]


def _continuation_text(
    tokenizer: Tokenizer, stop_strings: tuple[str, ...], prompt: Prompt
) -> ContinuationText:
    """Returns the text generated for a prompt so far, which grows as tokens are generated."""
    return ContinuationText(tokenizer, prompt.ids[: prompt.length], stop_strings)
