"""Checks that a job resumes with the same training data and seed as before."""

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
    """Checks that the training data has the same fingerprint as when the checkpoint was saved.

    Args:
      data: JSON data saved with the state, from `DataPosition.as_json`.
      pipeline: The training data.
      accepted: Names in the fingerprint, such as "corpus.sha256" or "corpus", whose values may
        differ (run.accept_changed_data).

    Returns:
      A line for each accepted difference.

    Raises:
      ConfigError: The fingerprints differ, in which case the message contains both values, or an
        accepted name is not in the fingerprints.
    """
    # Compare both after a round trip through JSON, which turns tuples into lists.
    old, new = (
        flatten_dict(json.loads(json.dumps(fingerprint)), sep=".")
        for fingerprint in (data["fingerprint"], pipeline.fingerprint())
    )
    names = sorted(old.keys() | new.keys())
    allowed: set[str] = set()
    for name in accepted:
        # A name also covers all names below it.
        covered = {n for n in names if f"{n}.".startswith(f"{name}.")}
        if not covered and name != RUN_SEED:
            raise ConfigError(
                f"run.accept_changed_data contains {name!r}; expected names in the fingerprint of "
                f"the training data: {names}.{did_you_mean(name, names)}"
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
            f"datasets.{TRAIN} differs from the data that the checkpoint of step {step_of(data)} "
            f"was trained with: {'; '.join(differing[name] for name in refused)}. Restore the "
            "previous data, start a new job in a different job_log_dir, or let the job continue "
            f"with different batches: --set 'run.accept_changed_data={in_brackets}'."
        )
    return [f"datasets.{TRAIN}: {text} (run.accept_changed_data)" for text in differing.values()]


RUN_SEED = "run.seed"


def check_same_seed(data: Mapping[str, Any], run: RunConfig) -> list[str]:
    """Checks that the run's seed, which dropout uses, has not changed since the checkpoint.

    Args:
      data: JSON data saved with the state.
      run: Settings of the run.

    Returns:
      A line if a different seed was accepted (run.accept_changed_data), else [].

    Raises:
      ConfigError: The seeds differ.
    """
    old = data.get("run_seed", run.seed)
    if old == run.seed:
        return []
    text = f"{RUN_SEED} was {old}, is {run.seed}"
    if RUN_SEED not in run.accept_changed_data:
        raise ConfigError(
            f"The checkpoint of step {step_of(data)} was trained with a different seed: {text}. "
            "Change the seed back, start a new job in a different job_log_dir, or let dropout "
            f"continue with different random numbers: --set 'run.accept_changed_data={RUN_SEED},'."
        )
    return [f"{text} (run.accept_changed_data)"]


def notes_on_resume(datasets: Mapping[str, InputPipeline]) -> list[str]:
    """Returns notes about datasets that cannot be resumed exactly or quickly."""
    reasons = {name: pipeline.nondeterminism() for name, pipeline in datasets.items()}
    lines = [
        f"datasets.{name} is not deterministic: {reason}; a resumed run will see different batches"
        for name, reason in reasons.items()
        if reason
    ]
    if datasets[TRAIN].replays:
        lines.append(
            f"datasets.{TRAIN} can only yield batches in order ({datasets[TRAIN].class_name()}): "
            "a run that resumes at step k first recomputes the k batches before it"
        )
    return lines
