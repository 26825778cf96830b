"""The evaluated model: weights on a mesh, a tokenizer, and the maximum sequence length."""

import dataclasses
import math
from typing import Any

from praxis_lite.core.errors import require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.huggingface.family import family_of
from praxis_lite.huggingface.model import HuggingFaceModel
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.inputs.text.token_ids import checked_int
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.trained_model.trained_model import TrainedModel
from praxis_lite.trainer.decoding.user_prompts import check_language_model

# Used for models without a known maximum, as in lm_eval's other adapters.
DEFAULT_MAX_LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A language model with a tokenizer, ready to score and continue text.

    Attributes:
      partitioner: Partitioner of the model's task.
      mdl_vars: Weights, in the layout of the partitioner's compiled steps.
      max_length: Maximum number of tokens in a sequence.
      info: Metadata of the model, which lm_eval adds to its results.
    """

    partitioner: Partitioner
    mdl_vars: Any
    max_length: int
    info: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.partitioner.task.tokenizer


def evaluated_model(
    model: TrainedModel | HuggingFaceModel, max_length: int | None = None
) -> EvaluatedModel:
    """Checks that a loaded model can be evaluated and chooses the maximum sequence length.

    Args:
      model: Result of `praxis_lite.load` or `praxis_lite.huggingface.load`.
      max_length: Maximum number of tokens in a sequence. The default is the model's number of
        positions, or if that is unlimited, the row length of the job's training data.

    Returns:
      The model for `LogLikelihoods` and `Continuations`.

    Raises:
      ConfigError: `model` is not a causal language model or has no tokenizer, max_length exceeds
        the model's number of positions, or several processes are running.
    """
    require(
        isinstance(model, TrainedModel | HuggingFaceModel),
        "harness_model: model",
        type(model).__name__,
        "the result of praxis_lite.load or praxis_lite.huggingface.load",
    )
    partitioner = model.partitioner
    check_language_model(partitioner.task, "lm_eval")
    num_positions = partitioner.task.num_ids().get("segment_pos")
    if max_length is None:
        max_length = num_positions or _known_length(model) or DEFAULT_MAX_LENGTH
    limit = {} if num_positions is None else {"maximum": num_positions}
    max_length = checked_int(max_length, "max_length", 1, **limit)
    return EvaluatedModel(partitioner, model.mdl_vars, max_length, _info(model))


def _known_length(model: TrainedModel | HuggingFaceModel) -> int | None:
    """Returns max_positions of a Hugging Face config, or the row length of the training data."""
    if isinstance(model, HuggingFaceModel):
        config = model.pretrained.config
        return family_of(config).decoder_settings(config).max_positions
    pipeline = model.job.datasets.get(TRAIN)
    spec = {} if pipeline is None else checked_spec(pipeline, f"datasets.{TRAIN}")
    return spec["ids"].shape[1] if "ids" in spec else None


def _info(model: TrainedModel | HuggingFaceModel) -> dict[str, Any]:
    leaves = model.partitioner.layout.select("mdl_vars").leaves()
    step = {"checkpoint_step": model.step} if isinstance(model, TrainedModel) else {}
    return {
        "model_num_parameters": sum(math.prod(leaf.shape) for leaf in leaves),
        "mesh": dict(model.partitioner.mesh.shape),
        **step,
    }
