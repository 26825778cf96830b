"""What is checked of a job before its first step compiles."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.experiment import RunConfig
from praxis_lite.inputs import InputPipeline
from praxis_lite.partitioner import Partitioner

TRAIN = "train"


def check_num_batches(datasets: Mapping[str, InputPipeline], run: RunConfig) -> None:
    """Checks that training has a batch for every step, and that every evaluation ends.

    Raises:
      ConfigError: names the dataset and what to change.
    """
    for name, pipeline in datasets.items():
        found = pipeline.num_batches
        if name == TRAIN and found is not None and found < run.num_train_steps:
            raise ConfigError(
                f"datasets.{TRAIN} ends after {found} batches, but run.num_train_steps is "
                f"{run.num_train_steps}. Use a pipeline without end (shuffle=True), or make at "
                f"most {found} steps."
            )
        if name != TRAIN and found is None and run.max_eval_batches is None:
            raise ConfigError(
                f"datasets.{name} has no end, so no evaluation on it would end. Use a pipeline of "
                "one pass (shuffle=False, or num_batches), or set run.max_eval_batches."
            )


def check_resumable(
    data: Mapping[str, Any], pipeline: InputPipeline, accepted: Sequence[str] = ()
) -> None:
    """Checks that the training data goes on where the checkpoint left it.

    Args:
      data: what was saved beside the state.
      accepted: names that may differ (run.accept_changed_data).

    Raises:
      ConfigError: the pipeline is not the one that the checkpoint was trained with; names what
        differs.
    """
    # What JSON makes of both: a tuple is a list there.
    old, new = (
        dict(_flat(json.loads(json.dumps(one))))
        for one in (data["fingerprint"], pipeline.fingerprint())
    )
    differing = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    if differing:
        found = "; ".join(f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in differing)
        raise ConfigError(
            f"datasets.{TRAIN} is not what the checkpoint of step {data['next_batch']} was trained "
            f"with: {found}. Set it back, or start a new job in another job_log_dir."
        )


def check_averages(partitioner: Partitioner, run: RunConfig) -> None:
    """Checks that there are averages of the weights where they are to be evaluated.

    Raises:
      ConfigError: the learner keeps none.
    """
    opt_states = partitioner.layout.shapes.opt_states
    for use_ema in (run.eval_use_ema_states, run.decode_use_ema_states):
        partitioner.task.learner.eval_opt_states(opt_states, use_ema=use_ema)


def check_watched_metrics(
    partitioner: Partitioner, datasets: Mapping[str, InputPipeline], run: RunConfig
) -> None:
    """Checks that the metrics which stop training or keep a checkpoint are among those evaluated.

    Raises:
      ConfigError: one is not; names those there are. Or no evaluation comes before the last step,
        or checkpoints are saved at steps without one.
    """
    for setting in ("early_stopping", "best_checkpoints"):
        watching = getattr(run, setting)
        if watching is None:
            continue
        names = []
        for name, pipeline in datasets.items():
            if name != TRAIN:
                scalars = partitioner.trace("eval", pipeline.element_spec()).out_info
                names += [f"{name}/{n}" for n in (*scalars, *pipeline.baselines())]
        if watching.metric not in names:
            raise ConfigError(
                f"run.{setting}.metric is '{watching.metric}', but evaluations have "
                f"{sorted(names) or 'no dataset'}.{did_you_mean(watching.metric, names)}"
            )
        if run.eval_every_steps is None:
            raise ConfigError(
                f"run.{setting} watches {watching.metric}, but the only evaluation is at the last "
                "step: set run.eval_every_steps."
            )
    saved_every = run.checkpoint_every_steps
    if run.best_checkpoints and (saved_every is None or saved_every % run.eval_every_steps):
        raise ConfigError(
            f"run.best_checkpoints needs an evaluation at each checkpoint, but "
            f"run.checkpoint_every_steps is {saved_every} and run.eval_every_steps "
            f"{run.eval_every_steps}. Make the first a multiple of the second."
        )


def _flat(fingerprint: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fingerprint.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
