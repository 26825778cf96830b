"""The model that lm_eval asks: weights on a mesh, its tokenizer, and how long its rows may be."""

import dataclasses
import math
from typing import Any

from praxis_lite.core.errors import require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.huggingface.family import family_of
from praxis_lite.huggingface.model import HuggingFaceModel
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.inputs.text.token_ids import whole_number
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.trained_model.trained_model import TrainedModel
from praxis_lite.trainer.decoding.user_prompts import check_language_model

# If the length is not known, as in lm_eval's other adapters.
USUAL_LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A language model that reads text.

    Attributes:
      partitioner: the task on its mesh.
      mdl_vars: the weights as the compiled steps take them.
      max_length: most tokens of a row.
      info: about the model, for lm_eval's results.
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
    """Returns a model as lm_eval needs it.

    Args:
      model: of `praxis_lite.load` or of `praxis_lite.huggingface.load`.
      max_length: most tokens of a row; None: the model's positions, or without an end of those the
        length of the rows of the job's data `train`.

    Raises:
      ConfigError: it is something else, no causal language model, or has no tokenizer for text;
        the model has fewer positions; there are several processes.
    """
    require(
        isinstance(model, TrainedModel | HuggingFaceModel), "harness_model: model",
        type(model).__name__, "a model of praxis_lite.load or praxis_lite.huggingface.load",
    )
    partitioner = model.partitioner
    check_language_model(partitioner.task, "lm_eval")
    num_positions = partitioner.task.num_ids().get("segment_pos")
    if max_length is None:
        max_length = num_positions or _length_of_data(model) or USUAL_LENGTH
    most = {} if num_positions is None else {"maximum": num_positions}
    max_length = whole_number(max_length, "max_length", 1, **most)
    return EvaluatedModel(partitioner, model.mdl_vars, max_length, _info(model))


def _length_of_data(model: TrainedModel | HuggingFaceModel) -> int | None:
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
        "mesh": dict(model.partitioner.mesh.shape), **step,
    }
