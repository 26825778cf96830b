"""The model that lm_eval asks: weights on a mesh, its tokenizer, and how long its rows may be."""

import dataclasses
import math
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.task import Task
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.inputs.text.token_ids import whole_number
from praxis_lite.inputs.tokenizers.base import Tokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer, TokenIds
from praxis_lite.run.trained_model import TrainedModel
from praxis_lite.tools.huggingface.family import family_of
from praxis_lite.tools.huggingface.model import HuggingFaceModel

# Where nothing tells the length, as in lm_eval's other adapters.
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
      model: of `praxis_lite.load` or of `praxis_lite.tools.huggingface.load`.
      max_length: most tokens of a row; None: the model's positions, or without an end of those the
        length of the rows of the job's data `train`.

    Raises:
      ConfigError: it is something else, no causal language model, or has no tokenizer for text;
        the model has not so many positions; there are several processes.
    """
    require(
        isinstance(model, TrainedModel | HuggingFaceModel), "harness_model: model",
        type(model).__name__, "a model of praxis_lite.load or praxis_lite.tools.huggingface.load",
    )
    require(
        jax.process_count() == 1, "The number of processes", jax.process_count(), "1",
        "lm_eval asks from one process. Load the model in one, on the devices that it has.",
    )
    partitioner = model.partitioner
    _check_language_model(partitioner.task)
    _check_tokenizer(partitioner.task)
    num_positions = partitioner.task.num_ids().get("segment_pos")
    if max_length is None:
        max_length = num_positions or _length_of_data(model) or USUAL_LENGTH
    most = {} if num_positions is None else {"most": num_positions}
    max_length = whole_number(max_length, "max_length", 1, **most)
    return EvaluatedModel(partitioner, model.mdl_vars, max_length, _info(model))


def _check_language_model(task: Task) -> None:
    expected = {"ids", "prefix_lengths", "weights"}
    if set(task.required_decode_inputs) != expected or task.tokenizer is None:
        raise ConfigError(
            f"{type(task).__name__} continues no texts. lm_eval asks language models: load a job "
            "of a LanguageModelTask."
        )
    kind = getattr(task.model.abstract_module(), "model_type", "causal")
    require(
        kind == "causal", "task.model.model_type", kind, "'causal'",
        "lm_eval scores a token by those before it. Load a job of a causal model.",
    )


def _check_tokenizer(task: Task) -> None:
    tokenizer, size = task.tokenizer, task.num_ids().get("ids")
    # Bytes are what a task without a tokenizer has.
    is_of_other_ids = type(tokenizer) is ByteTokenizer and size not in (256, 257, None)
    if isinstance(tokenizer, TokenIds) or is_of_other_ids:
        raise ConfigError(
            f"The model has {size} ids, and its task no tokenizer that makes them of text. Name "
            "the directory of its tokenizer when you load it: "
            "settings=['task.tokenizer=DIRECTORY']."
        )


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
