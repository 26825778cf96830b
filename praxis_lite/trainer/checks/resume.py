"""Checks that a job resumes with the data and the seed that its checkpoint was trained with."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.position import step_of


def check_resumable(
    data: Mapping[str, Any], pipeline: InputPipeline, accepted: Sequence[str] = ()
) -> list[str]:
    """Checks that the training data continues where the checkpoint left it.

    Args:
      data: saved with the state, by `DataPosition.as_json`.
      accepted: names that may differ (run.accept_changed_data), with all names below them.

    Returns:
      A line for each difference that was accepted.

    Raises:
      ConfigError: the checkpoint was trained with another pipeline; names what differs, with both
        values. Or the data has no such name as one that is accepted.
    """
    # Both are compared as JSON has them, with lists instead of tuples; by name: "corpus.sha256".
    old, new = (
        flatten_dict(json.loads(json.dumps(item)), sep=".")
        for item in (data["fingerprint"], pipeline.fingerprint())
    )
    names = sorted(old.keys() | new.keys())
    allowed: set[str] = set()
    for name in accepted:
        covered = {n for n in names if f"{n}.".startswith(f"{name}.")}
        if not covered and name != RUN_SEED:
            raise ConfigError(
                f"run.accept_changed_data names {name!r}, but the training data is described by "
                f"{names}.{did_you_mean(name, names)}"
            )
        allowed |= covered
    differing = {
        name: f"{name} was {old.get(name)!r}, is {new.get(name)!r}"
        for name in names
        if old.get(name) != new.get(name)
    }
    if refused := [name for name in differing if name not in allowed]:
        in_brackets = ",".join(refused) + ("," if len(refused) == 1 else "")
        raise ConfigError(
            f"datasets.{TRAIN} is not what the checkpoint of step {step_of(data)} was trained "
            f"with: {'; '.join(differing[name] for name in refused)}. Set it back, or start a new "
            "job in another job_log_dir, or accept that the job goes on with other batches: --set "
            f"'run.accept_changed_data={in_brackets}'."
        )
    return [f"datasets.{TRAIN}: {text} (run.accept_changed_data)" for text in differing.values()]


RUN_SEED = "run.seed"


def check_same_seed(data: Mapping[str, Any], run: RunConfig) -> list[str]:
    """Raises ConfigError if dropout would continue with another seed than the checkpoint's.

    Returns a line if another seed was accepted (run.accept_changed_data); `data` as
    `check_resumable`.
    """
    old = data.get("run_seed", run.seed)
    if old == run.seed:
        return []
    text = f"{RUN_SEED} was {old}, is {run.seed}"
    if RUN_SEED not in run.accept_changed_data:
        raise ConfigError(
            f"The checkpoint of step {step_of(data)} was trained with another seed: {text}. Set it "
            "back, or start a new job in another job_log_dir, or accept that dropout goes on with "
            f"other numbers: --set 'run.accept_changed_data={RUN_SEED},'."
        )
    return [f"{text} (run.accept_changed_data)"]


def notes_on_resume(datasets: Mapping[str, InputPipeline]) -> list[str]:
    """Returns a line for each dataset that a resumed run sees in other batches, or finds slowly."""
    reasons = {name: pipeline.nondeterminism() for name, pipeline in datasets.items()}
    lines = [
        f"datasets.{name} is not deterministic: {reason}; a resumed run will see other batches"
        for name, reason in reasons.items()
        if reason
    ]
    if datasets[TRAIN].replays:
        lines.append(
            f"datasets.{TRAIN} gives its batches only in order ({datasets[TRAIN].class_name()}): a "
            "run that resumes at step k first makes the k batches before it again"
        )
    return lines
