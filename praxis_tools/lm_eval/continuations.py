"""Continuations of contexts until a stop string: greedy, or drawn with a temperature."""

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
from praxis_tools.lm_eval.evaluated_model import EvaluatedModel
from praxis_tools.lm_eval.progress import Progress

# Reading the texts waits for the devices. Until they are read, rows that should end continue.
STEPS_BETWEEN_LOOKS = 8
# Settings of Greedy and Sample by the names that transformers has for them.
GREEDY_SETTINGS = {"repetition_penalty": "repetition_penalty"}
SAMPLE_SETTINGS = {"temperature": "temperature", "top_k": "k", "top_p": "p", "min_p": "min_p"}
_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A context to continue: its ids, the decoder, and texts that end the continuation."""

    context: Sequence[int]
    decoder: Greedy
    until: tuple[str, ...]


class Continuations:
    """Continues contexts on the model's mesh; two programs for each decoder and class of lengths.

    Args:
      model: to ask.
      num_rows: continued at a time.
      seed: of the draws.
      settings: of all decoders, such as num_cached_prefixes.
    """

    def __init__(self, model: EvaluatedModel, num_rows: int, seed: int, **settings: Any):
        self._model, self._num_rows, self._seed = model, num_rows, seed
        self._settings = settings
        self._batchings: dict[tuple[Greedy, int], ContinuousBatching] = {}

    def decoder(self, settings: Mapping[str, Any], max_new_tokens: int) -> Greedy:
        """Returns the decoder of a request's settings: do_sample, temperature, top_k, ...

        Raises:
          ConfigError: a setting is not known here, or has no such value.
        """
        known = {"do_sample", *GREEDY_SETTINGS, *SAMPLE_SETTINGS}
        for name in settings.keys() - known:
            raise ConfigError(
                f"generation_kwargs has {name}={settings[name]!r}; known here are until, "
                f"max_gen_toks, {', '.join(sorted(known))}.{did_you_mean(name, known)} Leave it "
                "out of the task, or of --gen_kwargs."
            )
        result: dict[str, Any] = {"max_decode_steps": max_new_tokens, **self._settings}
        result |= {our: settings[name] for name, our in GREEDY_SETTINGS.items() if name in settings}
        if not settings.get("do_sample") or not settings.get("temperature"):
            return for_tokenizer(Greedy(**result), self._model.tokenizer)
        drawn = {our: settings[name] for name, our in SAMPLE_SETTINGS.items() if name in settings}
        return for_tokenizer(Sample(**result, **{"k": 0, **drawn}), self._model.tokenizer)

    def of(self, requests: Sequence[Request]) -> list[str]:
        """Returns the text that each request's new tokens add, up to the first stop string.

        A context that leaves no room for the new tokens loses its first ids, with a warning.

        Raises:
          ConfigError: A context is empty, or max_gen_toks leaves no room for any.
        """
        contexts, tokenizer = list[np.ndarray](), self._model.tokenizer
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            context, length = self._context(request)
            contexts.append(context)
            groups[length, request.decoder, request.until].append(place)
        texts = [""] * len(requests)
        progress = Progress("continued", len(requests))
        mdl_vars = self._model.partitioner.for_decoding(self._model.mdl_vars)
        # The longest first: a lack of memory shows at once.
        for length, decoder, until in sorted(groups, key=lambda group: -group[0]):
            places = groups[length, decoder, until]
            new_ids: list[list[int]] = [[] for _ in places]
            batching = self._batching(decoder, length)
            stream = batching.stream(
                mdl_vars,
                (self._prompt(place, contexts[place], length) for place in places),
                num_steps=STEPS_BETWEEN_LOOKS,
                text_of=lambda prompt, until=until: ContinuationText(
                    tokenizer, prompt.ids[: prompt.length], until
                ),
            )
            for new in stream:
                new_ids[new.index].extend(new.ids.tolist())
                progress.add(int(new.done))
            _log.info(batching.latest.summary(f"contexts of up to {length} ids"))
            for place, ids in zip(places, new_ids, strict=True):
                texts[place] = continuation_text(tokenizer, contexts[place], ids, until).text
        return texts

    def _context(self, request: Request) -> tuple[np.ndarray, int]:
        """Returns a context, without its first ids if it is too long, and its padded length."""
        num_new = request.decoder.max_decode_steps
        most = self._model.max_length - num_new
        if most < 1:
            raise ConfigError(
                f"max_gen_toks is {num_new}; expected less than max_length, "
                f"{self._model.max_length}, so that a context has room. Lower it: --gen_kwargs "
                "max_gen_toks=NUMBER."
            )
        if not request.context:
            raise ConfigError(
                "A request of generate_until has an empty context, and the tokenizer puts nothing "
                "before it. Set add_bos_token=True, or fix the task."
            )
        size = self._model.partitioner.task.num_ids().get("ids")
        ids = token_ids(request.context, "A context", size, ndim=1)
        if len(ids) > most:
            _log.warning(
                "a context of %d ids and %d new ones exceed max_length, %d: the first %d ids are "
                "left out", len(ids), num_new, self._model.max_length, len(ids) - most,
            )
        ids = ids[-most:]
        return ids, length_class(len(ids), most)

    def _prompt(self, place: int, context: np.ndarray, length: int) -> Prompt:
        ids = np.pad(context, (0, length - len(context)))
        key = jax.random.fold_in(jax.random.key(self._seed), place)
        return Prompt(ids, len(context), key)

    def _batching(self, decoder: Greedy, length: int) -> ContinuousBatching:
        if (decoder, length) not in self._batchings:
            partitioner = self._model.partitioner
            self._batchings[decoder, length] = ContinuousBatching(
                decoder, partitioner.task.module, self._num_rows, length,
                wrap=functools.partial(partitioner.with_mdl_vars, has_splits=True),
                compiler_options=partitioner.decode_options,
            )
        return self._batchings[decoder, length]
