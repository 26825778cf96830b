"""Checks of a job before its first step compiles."""

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
from praxis_lite.inputs.batches import checked_batches
from praxis_lite.inputs.mixing.mixture import Mixture
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer
from praxis_lite.inputs.workers import WithWorkers
from praxis_lite.trainer.metrics.step_times import HFU, MFU, TIMES

__all__ = ("check_parts",)


def check_parts(job: Any) -> None:
    """Raises ConfigError if a job's parts have wrong types, for a config.json may say anything."""
    _check_part("The config", job, Job)
    parts = {
        "mesh": MeshConfig, "task": Task, "run": RunConfig, "datasets": Mapping,
        "decode_datasets": Mapping,
    }
    for path, expected in parts.items():
        _check_part(path, getattr(job, path), expected)
    if not hasattr(job.task, "weight_sharding"):
        name = type(job.task).__name__
        raise ConfigError(
            f"{name} was built without Task's own constructor: let {name}.__init__ call "
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
            f"{path} is built as a {type(actual).__name__}; expected {article} "
            f"{expected.__name__}. Fix it in the experiment, or start a new job if config.json was "
            "changed."
        )


def check_num_batches(datasets: Mapping[str, InputPipeline], run: RunConfig) -> None:
    """Raises ConfigError unless training has a batch for every step and every evaluation ends."""
    for name, pipeline in datasets.items():
        result = pipeline.num_batches
        if name == TRAIN and result is not None and result < run.num_train_steps:
            raise ConfigError(
                f"datasets.{TRAIN} ends after {result} batches, but run.num_train_steps is "
                f"{run.num_train_steps}. Use a pipeline without end (shuffle=True), or make at "
                f"most {result} steps."
            )
        if name != TRAIN and result is None and run.evaluation.max_batches is None:
            raise ConfigError(
                f"datasets.{name} has no end, so no evaluation on it would end. Use a pipeline of "
                "one pass (shuffle=False, or num_batches), or set run.evaluation.max_batches."
            )


def check_batches_left(pipeline: InputPipeline, run: RunConfig, skipped: Sequence[int]) -> None:
    """Raises ConfigError if training lacks batches without those `skipped` after loss spikes."""
    result = pipeline.num_batches
    if result is not None and result - len(skipped) < run.num_train_steps:
        raise ConfigError(
            f"datasets.{TRAIN} has {result} batches, of which {len(skipped)} were left out after "
            f"loss spikes ({', '.join(map(str, skipped[:5]))}): too few for run.num_train_steps="
            f"{run.num_train_steps}. Make at most {result - len(skipped)} steps."
        )


def check_tokens(task: Task, pipeline: InputPipeline, name: str) -> None:
    """Raises ConfigError unless a dataset of text has the tokens of the task and of its model.

    Args:
      name: of the dataset, "datasets.train".
    """
    pipeline = _without_workers(pipeline)
    if isinstance(pipeline, Mixture):
        for source, item in pipeline.sources.items():
            check_tokens(task, item, f"{name}.sources.{source}")
    result, own = pipeline.tokenizer, task.tokenizer
    if result is None or own is None:
        return
    if result.fingerprint() != own.fingerprint():
        raise ConfigError(
            f"{name} has tokens of {result}, but the task's tokenizer is {own}. Name one for both; "
            "in the library's experiments on text by --set corpus.tokenizer=DIRECTORY."
        )
    size = task.num_ids().get("ids")
    if size is not None and (largest := pipeline.largest_id()) is not None:
        place = pipeline.place_of_largest_id()
        where = f", at {place}," if place else ""
        require(
            largest < size, f"{name}: the largest id of {result}{where}", largest,
            f"{size - 1} at most, for the model's vocab_size is {size}",
            f"Give the model vocab_size={result.vocab_size}, or another tokenizer.",
        )


def why_bytes(pipeline: InputPipeline) -> str:
    """Returns why a pipeline's text is bytes, behind another sentence; "" if it is not."""
    if not isinstance(_without_workers(pipeline).tokenizer, ByteTokenizer):
        return ""
    return (
        " Text is bytes where no tokenizer is named, and where HF_DIR has none: put its "
        "tokenizer.json there, or name a directory by --set corpus.tokenizer=DIRECTORY."
    )


def _without_workers(pipeline: InputPipeline) -> InputPipeline:
    return pipeline.pipeline if isinstance(pipeline, WithWorkers) else pipeline


def check_decoder(task: Task) -> None:
    """Raises ConfigError if a task's decoder ends rows with a token that the model lacks."""
    size = task.num_ids().get("ids")
    if isinstance(task.decoder, Decoder) and size is not None:
        task.decoder.check_vocabulary(size)


def check_first_batches(datasets: Mapping[str, InputPipeline]) -> None:
    """Raises ConfigError if the first batch of a dataset, or the fingerprint of `train`, is wrong.

    The first batch of `train` is read before any step is made, and not here.
    """
    fingerprint, problem = datasets[TRAIN].fingerprint(), ""
    try:
        json.dumps(fingerprint)
    except (TypeError, ValueError) as error:
        problem = f" ({error})"
    require(
        isinstance(fingerprint, Mapping) and not problem,
        f"datasets.{TRAIN}: the result of {datasets[TRAIN].class_name()}.fingerprint", fingerprint,
        f"a dict of all that determines the batches, as numbers, texts and lists of them{problem}",
    )
    for name, pipeline in datasets.items():
        if name != TRAIN:
            next(checked_batches(pipeline, f"datasets.{name}"), None)


def notes_on_batch_size(pipeline: InputPipeline) -> list[str]:
    """Returns a warning for each training pipeline whose batch is larger than its data."""
    pipeline = _without_workers(pipeline)
    if isinstance(pipeline, Mixture):
        return []  # A source has its own length, and no separate batch.
    num_examples = getattr(pipeline, "num_examples", None)
    if num_examples is None or num_examples >= pipeline.batch_size:
        return []
    return [
        f"WARNING: datasets.{TRAIN} has {num_examples:,} examples and a batch_size of "
        f"{pipeline.batch_size:,}: each batch repeats examples. Lower batch_size, or add data."
    ]


def check_averages(partitioner: Partitioner, run: RunConfig) -> None:
    """Raises ConfigError if averages of weights are to be evaluated and the learner keeps none."""
    opt_states = partitioner.layout.shapes.opt_states
    for use_ema in (run.evaluation.use_ema_states, run.decode_use_ema_states):
        partitioner.task.learner.eval_opt_states(opt_states, use_ema=use_ema)


def check_watched_metrics(
    partitioner: Partitioner, datasets: Mapping[str, InputPipeline], run: RunConfig
) -> None:
    """Raises ConfigError if a metric that stops training or keeps checkpoints is not evaluated.

    It must be evaluated before the last step too, and for run.checkpoints.best at each checkpoint;
    or by a follower.
    """
    for setting in ("stopping.early", "checkpoints.best"):
        watching = operator.attrgetter(setting)(run)
        if watching is None:
            continue
        names = []
        for name, pipeline in datasets.items():
            if name != TRAIN:
                scalars = partitioner.eval_step.trace(pipeline.element_spec()).out_info
                names += [f"{name}/{n}" for n in (*scalars, *pipeline.baselines())]
        if watching.metric not in names:
            raise ConfigError(
                f"run.{setting}.metric is '{watching.metric}', but evaluations have "
                f"{sorted(names) or 'no dataset'}.{did_you_mean(watching.metric, names)}"
            )
        if run.evaluation.every_steps is None and not run.evaluation.by_follower:
            raise ConfigError(
                f"run.{setting} watches {watching.metric}, but the only evaluation is at the last "
                "step: set run.evaluation.every_steps, or leave it to a follower "
                "(run.evaluation.by_follower)."
            )
    if run.evaluation.by_follower:
        return
    saved_every = run.checkpoints.every_steps
    if run.checkpoints.best and (saved_every is None or saved_every % run.evaluation.every_steps):
        raise ConfigError(
            f"run.checkpoints.best needs an evaluation at each checkpoint, but "
            f"run.checkpoints.every_steps is {saved_every} and run.evaluation.every_steps "
            f"{run.evaluation.every_steps}. Make the first a multiple of the second."
        )


# Names of a line of metrics.jsonl or eval_metrics.jsonl besides the task's and the learner's.
_OTHER_NAMES = {
    "step", "dataset", *TIMES, MFU, HFU, "is_loss_spike", "num_batches_left_out",
}


def check_metric_names(partitioner: Partitioner, train: InputPipeline) -> None:
    """Raises ConfigError if a metric of the task would write over another number of its line."""
    outputs = partitioner.train_step.trace(train.element_spec()).out_info[1]
    others = {*outputs["learner"], *_OTHER_NAMES, f"{partitioner.task.weight_unit}_per_second"}
    if taken := sorted(others & outputs["metrics"].keys()):
        raise ConfigError(
            f"{type(partitioner.task).__name__} reports a metric called {taken[0]!r}, but lines of "
            "metrics.jsonl have another number of that name. Give the metric another name."
        )
