"""`harness_model`: wraps a loaded model as an lm_eval `LM`."""

from typing import Any

from praxis_lite.host.optional_packages import require_package
from praxis_lite.huggingface.model import HuggingFaceModel
from praxis_lite.inputs.text.token_ids import checked_int
from praxis_lite.trained_model.trained_model import TrainedModel
from praxis_tools.lm_eval.evaluated_model import evaluated_model
from praxis_tools.lm_eval.text_ids import TextIds


def harness_model(
    model: TrainedModel | HuggingFaceModel,
    *,
    batch_size: int = 32,
    max_length: int | None = None,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    seed: int = 0,
    num_cached_prefixes: int = 0,
    num_speculative_tokens: int = 0,
) -> Any:
    """Returns an lm_eval `LM` for `lm_eval.simple_evaluate(harness_model(model), ...)`.

    The model scores and continues text on its mesh. Requests are sorted by length and padded to
    powers of two, so that the model is compiled for only a few shapes.

    Args:
      model: Result of `praxis_lite.load` or `praxis_lite.huggingface.load`.
      batch_size: Number of requests per batch, rounded up to a multiple of the number of devices.
      max_length: Maximum total number of tokens in the context and the continuation; the first
        tokens of longer requests are removed. The default is the model's number of positions, or if
        that is unlimited, the row length of the job's training data.
      add_bos_token: Whether each text begins with the beginning-of-text token. If None, this
        depends on the tokenizer.
      prefix_token_id: Id of the token that precedes texts without a context. The default is the
        beginning-of-text token, or the end-of-text token if the tokenizer has no beginning-of-text
        token.
      seed: Seed for tasks that sample with a temperature.
      num_cached_prefixes: Number of prompt prefixes whose cache entries are reused, such as
        few-shot examples; see `praxis_lite.decode.Greedy`.
      num_speculative_tokens: Number of draft tokens per step; see `praxis_lite.decode.Greedy`.

    Raises:
      ConfigError: lm_eval is not installed, the model is not a causal language model with a
        tokenizer, or an argument has an invalid value.
    """
    require_package("lm_eval", "harness_model")
    num_rows = checked_int(batch_size, "batch_size", 1)
    seed = checked_int(seed, "seed", 0, 2**32 - 1)
    settings = {
        "num_cached_prefixes": checked_int(num_cached_prefixes, "num_cached_prefixes", 0),
        "num_speculative_tokens": checked_int(num_speculative_tokens, "num_speculative_tokens", 0),
    }
    evaluated = evaluated_model(model, max_length)
    text_ids = TextIds(evaluated.tokenizer, add_bos_token, prefix_token_id)
    num_devices = evaluated.partitioner.mesh.size
    from praxis_tools.lm_eval.lm import HarnessModel

    num_rows = -(-num_rows // num_devices) * num_devices
    return HarnessModel(evaluated, text_ids, num_rows, seed, **settings)
