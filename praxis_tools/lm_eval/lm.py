"""Implements lm_eval's `LM` interface; imported late, because lm_eval is an optional package."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

from praxis_lite.core.errors import ConfigError
from praxis_tools.lm_eval.chat_text import chat_text
from praxis_tools.lm_eval.continuations import Continuations, Request
from praxis_tools.lm_eval.evaluated_model import EvaluatedModel
from praxis_tools.lm_eval.log_likelihoods import LogLikelihoods
from praxis_tools.lm_eval.model_args import model_from_args
from praxis_tools.lm_eval.text_ids import TextIds

DEFAULT_NEW_TOKENS = 256  # As in lm_eval's other adapters.


class HarnessModel(TemplateLM):
    """Scores and generates text for requests from lm_eval tasks.

    Args:
      model: The evaluated model.
      text_ids: Rules for tokenizing text.
      num_rows: Number of requests per batch.
      seed: Seed for sampling.
      **settings: Arguments passed to all decoders.
    """

    def __init__(
        self, model: EvaluatedModel, text_ids: TextIds, num_rows: int, seed: int, **settings: Any
    ):
        super().__init__()
        self._model, self._text_ids = model, text_ids
        self._log_likelihoods = LogLikelihoods(model, num_rows)
        self._continuations = Continuations(model, num_rows, seed, **settings)
        self.tokenizer = model.tokenizer

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """Returns the model for lm_eval's `--model_args`; see `model_from_args`."""
        return model_from_args({**arg_dict, **(additional_config or {})})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """Returns the model for a string such as "job=DIR,batch_size=32"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._text_ids.prefix_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a sequence."""
        return self._model.max_length

    @property
    def max_gen_toks(self) -> int:
        """Default number of new tokens for requests that do not specify a number."""
        return min(DEFAULT_NEW_TOKENS, max(1, self.max_length // 2))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        return self._text_ids.encode(string, add_special_tokens)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of each text in nats; every token is scored exactly once."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self._log_likelihoods.score([pair for pairs in windows for pair in pairs]))
        totals = [sum(next(scores).log_likelihood for _ in pairs) for pairs in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Splits a text into (context, continuation) pairs of token ids within max_length."""
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
        )
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        scores = self._log_likelihoods.score([request[1:] for request in requests])
        answers = [(score.log_likelihood, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each context, up to its first stop string."""
        parsed = [self._request(*request.args) for request in requests]
        texts = [
            postprocess_generated_text(text, list(request.until), None)
            for text, request in zip(self._continuations.generate(parsed), parsed, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _request(self, context: str, gen_kwargs: Mapping[str, Any]) -> Request:
        settings = normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks)
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(settings.pop("until"), eos=eos)
        max_new_tokens = settings.pop("max_gen_toks")
        decoder = self._continuations.decoder(settings, max_new_tokens)
        return Request(self.tok_encode(context), decoder, tuple(filter(None, until)))

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return chat_text(self.tokenizer, chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer, which is part of the keys in lm_eval's request cache."""
        return "-".join(map(str, self.tokenizer.fingerprint().values()))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the tokenizer's chat template, or None if `chat_template` is False.

        Raises:
          ConfigError: The tokenizer has no template, or a name other than "default" is given.
        """
        if not chat_template:
            return None
        if chat_template not in (True, "default"):
            raise ConfigError(
                f"--apply_chat_template is {chat_template!r}; expected no value, because only the "
                "tokenizer's default template is supported. Remove the value."
            )
        if self.tokenizer.chat is None:
            raise ConfigError(
                f"{self.tokenizer} has no chat template. Add chat_template.jinja to its directory, "
                "or remove --apply_chat_template."
            )
        return self.tokenizer.chat.source

    def get_model_info(self) -> dict[str, Any]:
        """Returns metadata about the model for lm_eval's results file."""
        return self._model.info
