"""Checks that a job's settings are consistent, before its first step is compiled."""

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, require
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.core.task import Task
from praxis_lite.decode.decoder import Decoder
from praxis_lite.experiment.experiment import Job, check_dataset_name
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.mixing.mixture import Mixture
from praxis_lite.inputs.pipeline_checks import checked_batches
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer
from praxis_lite.inputs.workers import WithWorkers
from praxis_lite.trainer.metrics.step_times import HFU, MFU, TIMES

__all__ = ("check_parts",)


def check_parts(job: Any) -> None:
    """Raises ConfigError if a field of the job has the wrong type.

    This can happen if config.json was edited.
    """
    _check_part("The config", job, Job)
    parts = {
        "mesh": MeshConfig,
        "task": Task,
        "run": RunConfig,
        "datasets": Mapping,
        "decode_datasets": Mapping,
    }
    for path, expected in parts.items():
        _check_part(path, getattr(job, path), expected)
    if not hasattr(job.task, "weight_sharding"):
        name = type(job.task).__name__
        raise ConfigError(
            f"{name}.__init__ does not call the constructor of Task. Call "
            "super().__init__(model, learner)."
        )
    for root in ("datasets", "decode_datasets"):
        for name, pipeline in getattr(job, root).items():
            check_dataset_name(name, root)
            _check_part(f"{root}.{name}", pipeline, InputPipeline)


def _check_part(path: str, actual: Any, expected: type) -> None:
    if not isinstance(actual, expected):
        article = "an" if expected.__name__[0] in "AEIOU" else "a"
        raise ConfigError(
            f"{path} has type {type(actual).__name__}; expected {article} {expected.__name__}. Fix "
            "the experiment or, if config.json was edited, start a new job."
        )


def check_num_batches(datasets: Mapping[str, InputPipeline], run: RunConfig) -> None:
    """Raises ConfigError if there are too few training batches, or evaluation data is endless."""
    for name, pipeline in datasets.items():
        num_batches = pipeline.num_batches
        if name == TRAIN and num_batches is not None and num_batches < run.num_train_steps:
            raise ConfigError(
                f"datasets.{TRAIN} ends after {num_batches} batches, but run.num_train_steps is "
                f"{run.num_train_steps}. Use an endless pipeline (shuffle=True), or set "
                f"run.num_train_steps to at most {num_batches}."
            )
        if name != TRAIN and num_batches is None and run.evaluation.max_batches is None:
            raise ConfigError(
                f"datasets.{name} is endless, so its evaluation would never end. Use a pipeline "
                "with a single pass (shuffle=False, or num_batches), or set "
                "run.evaluation.max_batches."
            )


def check_batches_left(pipeline: InputPipeline, run: RunConfig, skipped: Sequence[int]) -> None:
    """Raises ConfigError if too few batches remain once those with loss spikes are skipped."""
    num_batches = pipeline.num_batches
    if num_batches is not None and num_batches - len(skipped) < run.num_train_steps:
        raise ConfigError(
            f"datasets.{TRAIN} has only {num_batches} batches for run.num_train_steps="
            f"{run.num_train_steps}. Skipped because of loss spikes: "
            f"{', '.join(map(str, skipped))}. Set run.num_train_steps to at most "
            f"{num_batches - len(skipped)}."
        )


def check_tokens(task: Task, pipeline: InputPipeline, name: str) -> None:
    """Checks that a dataset uses the task's tokenizer, and that its ids are in the vocabulary.

    Args:
      task: The task, with its tokenizer and model.
      pipeline: The dataset. Only text datasets are checked.
      name: The dataset's name, such as "datasets.train".

    Raises:
      ConfigError: The tokenizers differ, or an id is out of range.
    """
    pipeline = _without_workers(pipeline)
    if isinstance(pipeline, Mixture):
        for source_name, source in pipeline.sources.items():
            check_tokens(task, source, f"{name}.sources.{source_name}")
    data_tokenizer, task_tokenizer = pipeline.tokenizer, task.tokenizer
    if data_tokenizer is None or task_tokenizer is None:
        return
    if data_tokenizer.fingerprint() != task_tokenizer.fingerprint():
        raise ConfigError(
            f"{name} is tokenized by {data_tokenizer}, but the task's tokenizer is "
            f"{task_tokenizer}. Use the same tokenizer for both. In the library's text "
            "experiments, use --set corpus.tokenizer=DIRECTORY."
        )
    size = task.num_ids().get("ids")
    if size is not None and (largest := pipeline.largest_id()) is not None:
        place = pipeline.place_of_largest_id()
        where = f", at {place}," if place else ""
        require(
            largest < size,
            f"{name}: the largest id of {data_tokenizer}{where}",
            largest,
            f"at most {size - 1}, because the model's vocab_size is {size}",
            f"Set the model's vocab_size={data_tokenizer.vocab_size}, or use a different "
            "tokenizer.",
        )


def byte_tokenizer_hint(pipeline: InputPipeline) -> str:
    """Returns a hint on how to set a tokenizer if text is encoded as bytes, else ""."""
    if not isinstance(_without_workers(pipeline).tokenizer, ByteTokenizer):
        return ""
    return (
        " Text is encoded as bytes, because no tokenizer was found. Use --set "
        "corpus.tokenizer=DIRECTORY, or put the model's tokenizer.json into HF_DIR."
    )


def _without_workers(pipeline: InputPipeline) -> InputPipeline:
    return pipeline.pipeline if isinstance(pipeline, WithWorkers) else pipeline


def check_decoder(task: Task) -> None:
    """Raises ConfigError if the decoder's end-of-sequence id is not in the model's vocabulary."""
    size = task.num_ids().get("ids")
    if isinstance(task.decoder, Decoder) and size is not None:
        task.decoder.check_vocabulary(size)


def check_first_batches(datasets: Mapping[str, InputPipeline]) -> None:
    """Checks the first batch of each evaluation dataset, and the fingerprint of `train`.

    The first training batch is checked when the loop reads it.

    Raises:
      ConfigError: A batch does not match its dataset's spec, or the fingerprint is not JSON.
    """
    fingerprint, problem = datasets[TRAIN].fingerprint(), ""
    try:
        json.dumps(fingerprint)
    except (TypeError, ValueError) as error:
        problem = f" ({error})"
    require(
        isinstance(fingerprint, Mapping) and not problem,
        f"datasets.{TRAIN}: the result of {datasets[TRAIN].class_name()}.fingerprint",
        fingerprint,
        f"a JSON-serializable dict of everything that determines the batches{problem}",
    )
    for name, pipeline in datasets.items():
        if name != TRAIN:
            next(checked_batches(pipeline, f"datasets.{name}"), None)


def notes_on_batch_size(pipeline: InputPipeline) -> list[str]:
    """Returns a warning if a training batch is larger than the dataset, else []."""
    pipeline = _without_workers(pipeline)
    if isinstance(pipeline, Mixture):
        return []  # A batch of a mixture contains rows from several sources.
    num_examples = getattr(pipeline, "num_examples", None)
    if num_examples is None or num_examples >= pipeline.batch_size:
        return []
    return [
        f"datasets.{TRAIN} has {num_examples:,} examples and a batch_size of "
        f"{pipeline.batch_size:,}, so each batch repeats examples. Lower batch_size, or add data."
    ]


def check_averages(partitioner: Partitioner, run: RunConfig) -> None:
    """Raises ConfigError if the run evaluates averaged weights but the learner has no averages."""
    opt_states = partitioner.layout.shapes.opt_states
    for use_ema in (run.evaluation.use_ema_states, run.decode_use_ema_states):
        partitioner.task.learner.eval_opt_states(opt_states, use_ema=use_ema)


def check_watched_metrics(
    partitioner: Partitioner, datasets: Mapping[str, InputPipeline], run: RunConfig
) -> None:
    """Checks the metrics used by early stopping (run.stopping.early) and run.checkpoints.best.

    Raises:
      ConfigError: The metric is not computed in any evaluation; or, if no follower is used, the
        only evaluation is after the last step, or some checkpoints are saved without an evaluation.
    """
    for setting in ("stopping.early", "checkpoints.best"):
        watcher = operator.attrgetter(setting)(run)
        if watcher is None:
            continue
        names = []
        for name, pipeline in datasets.items():
            if name != TRAIN:
                # The names of the metrics are known from tracing the eval step.
                scalars = partitioner.eval_step.trace(pipeline.element_spec()).out_info
                names += [f"{name}/{n}" for n in (*scalars, *pipeline.baselines())]
        if watcher.metric not in names:
            found = f"run.{setting}.metric is '{watcher.metric}', but"
            raise ConfigError(
                f"{found} the evaluation metrics are {sorted(names)}."
                f"{did_you_mean(watcher.metric, names)}"
                if names
                else f"{found} there is no evaluation dataset. Add one to `datasets()`."
            )
        if run.evaluation.every_steps is None and not run.evaluation.by_follower:
            raise ConfigError(
                f"run.{setting} uses {watcher.metric}, but the only evaluation is after the last "
                "step. Set run.evaluation.every_steps, or set run.evaluation.by_follower and run "
                "a follower."
            )
    if run.evaluation.by_follower:
        return
    saved_every, evaluated_every = run.checkpoints.every_steps, run.evaluation.every_steps
    if run.checkpoints.best and (
        saved_every is None or evaluated_every is None or saved_every % evaluated_every
    ):
        raise ConfigError(
            "run.checkpoints.best requires an evaluation at each checkpoint, so "
            "run.checkpoints.every_steps must be a multiple of run.evaluation.every_steps; they "
            f"are {saved_every} and {evaluated_every}. Change one of them."
        )


# Keys in lines of metrics.jsonl and eval_metrics.jsonl that are not metrics from the task or the
# learner.
_RESERVED_NAMES = {
    "step",
    "dataset",
    *TIMES,
    MFU,
    HFU,
    "is_loss_spike",
    "num_skipped_batches",
}


def check_metric_names(partitioner: Partitioner, train: InputPipeline) -> None:
    """Raises ConfigError if a metric's name is already used for another value in metrics.jsonl."""
    outputs = partitioner.train_step.trace(train.element_spec()).out_info[1]
    reserved = {*outputs["learner"], *_RESERVED_NAMES, f"{partitioner.task.weight_unit}_per_second"}
    if taken := sorted(reserved & outputs["metrics"].keys()):
        raise ConfigError(
            f"{type(partitioner.task).__name__} reports a metric named {taken[0]!r}, but "
            "metrics.jsonl uses this name for a different value. Rename the metric."
        )
