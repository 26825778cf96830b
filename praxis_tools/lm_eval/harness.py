"""A loaded model as a model of lm_eval."""

from typing import Any

from praxis_lite.host.optional_packages import require_package
from praxis_lite.huggingface.model import HuggingFaceModel
from praxis_lite.inputs.text.token_ids import whole_number
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
    """Returns an `LM` of lm_eval, for `lm_eval.simple_evaluate(harness_model(model), ...)`.

    It scores and continues texts on the model's mesh. Requests are sorted by length and padded to
    powers of two, so that a program serves many batches.

    Args:
      model: of `praxis_lite.load` or `praxis_lite.huggingface.load`.
      batch_size: rows of a batch; made a multiple of the mesh's devices.
      max_length: most tokens of a row, context and continuation; None: as many as the model has
        positions, or without an end of those as the rows of the job's training data have. What is
        longer loses its first tokens.
      add_bos_token: True: texts begin with the tokenizer's beginning of a text; False: with
        nothing; None: as the tokenizer does.
      prefix_token_id: precedes texts that have no context; None: the tokenizer's beginning of
        a text, or else its end.
      seed: of draws, where a task asks for a temperature.
      num_cached_prefixes, num_speculative_tokens: of `praxis_lite.decode.Greedy`, for
        continuations: examples before a question are read once; drafts are checked.

    Raises:
      ConfigError: lm_eval is not installed; the model is not a causal language model of texts;
        an argument has a wrong value.
    """
    require_package("lm_eval", "harness_model")
    num_rows = whole_number(batch_size, "batch_size", 1)
    seed = whole_number(seed, "seed", 0, 2**32 - 1)
    settings = {
        "num_cached_prefixes": whole_number(num_cached_prefixes, "num_cached_prefixes", 0),
        "num_speculative_tokens": whole_number(num_speculative_tokens, "num_speculative_tokens", 0),
    }
    evaluated = evaluated_model(model, max_length)
    text_ids = TextIds(evaluated.tokenizer, add_bos_token, prefix_token_id)
    num_devices = evaluated.partitioner.mesh.size
    from praxis_tools.lm_eval.lm import HarnessModel

    num_rows = -(-num_rows // num_devices) * num_devices
    return HarnessModel(evaluated, text_ids, num_rows, seed, **settings)
