"""A model as lm_eval asks it: its class `LM`. Imported late, for lm_eval is an optional package."""

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
from praxis_tools.lm_eval.model_args import model_of_args
from praxis_tools.lm_eval.text_ids import TextIds

USUAL_NEW_TOKENS = 256  # As of lm_eval's other adapters.


class HarnessModel(TemplateLM):
    """Answers the requests of lm_eval's tasks.

    Args:
      model: that is asked.
      text_ids: how its texts become ids.
      num_rows: of a batch.
      seed: of draws.
      settings: of the decoders.
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
        """Returns the model of lm_eval's `--model_args`; see `model_of_args`."""
        return model_of_args({**arg_dict, **(additional_config or {})})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """Returns the model of "job=DIR,batch_size=32"; see `model_of_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._text_ids.prefix_id

    @property
    def max_length(self) -> int:
        """The most tokens of a row."""
        return self._model.max_length

    @property
    def max_gen_toks(self) -> int:
        """The number of new tokens of requests that do not set it."""
        return min(USUAL_NEW_TOKENS, max(1, self.max_length // 2))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        return self._text_ids.of(string, add_special_tokens)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of each text, in nats; each token is scored once."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self._log_likelihoods.of([pair for pairs in windows for pair in pairs]))
        results = [sum(next(scores).log_likelihood for _ in pairs) for pairs in windows]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
        )
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        scores = self._log_likelihoods.of([request[1:] for request in requests])
        answers = [(score.log_likelihood, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def generate_until(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns each context's continuation, before the first of its stop strings."""
        asked = [self._request(*request.args) for request in requests]
        texts = [
            postprocess_generated_text(text, list(request.until), None)
            for text, request in zip(self._continuations.of(asked), asked, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _request(self, context: str, gen_kwargs: Mapping[str, Any]) -> Request:
        settings = normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks)
        end = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(settings.pop("until"), eos=end)
        max_new_tokens = settings.pop("max_gen_toks")
        decoder = self._continuations.decoder(settings, max_new_tokens)
        return Request(self.tok_encode(context), decoder, tuple(filter(None, until)))

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return chat_text(self.tokenizer, chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """A name for equal tokenizers, by which lm_eval keeps requests with their chat template."""
        return "-".join(map(str, self.tokenizer.fingerprint().values()))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the tokenizer's template, or None if none is asked for.

        Raises:
          ConfigError: it has none, or another name than "default" is asked for.
        """
        if not chat_template:
            return None
        if chat_template not in (True, "default"):
            raise ConfigError(
                f"--apply_chat_template names {chat_template!r}; expected no name, because "
                "the template is the tokenizer's default."
            )
        if self.tokenizer.chat is None:
            raise ConfigError(
                f"{self.tokenizer} has no chat template. Put one next to its files, as "
                "chat_template.jinja, or leave out --apply_chat_template."
            )
        return self.tokenizer.chat.source

    def get_model_info(self) -> dict[str, Any]:
        """Returns facts about the model, for the file of results."""
        return self._model.info
