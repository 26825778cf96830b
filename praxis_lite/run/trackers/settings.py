"""The trackers of a job as a setting: those that every job has, and what may stand there."""

import re
from collections.abc import Mapping
from typing import Any

from praxis_lite.core.errors import is_whole, require
from praxis_lite.run.trackers.tensorboard import TensorBoard
from praxis_lite.run.trackers.tracker import Tracker

_CHANGE = "Change it in the experiment's run(), or with --set."


def default_trackers() -> dict[str, Tracker | None]:
    """Returns the trackers that every job has."""
    return {"tensorboard": TensorBoard()}


def check_trackers(trackers: Any) -> None:
    """Raises ConfigError unless these are trackers by name, each with its settings in range."""
    require(
        isinstance(trackers, Mapping), "run.trackers", trackers,
        "trackers by name, such as {'wandb': fdl.Config(WeightsAndBiases)}", _CHANGE,
    )
    for name, tracker in trackers.items():
        require(
            isinstance(name, str) and bool(re.fullmatch(r"[\w-]{1,60}", name))
            and name != "run_id",
            "A name in run.trackers", name, "letters, digits, _ and -, which name a file", _CHANGE,
        )
        require(
            tracker is None or isinstance(tracker, Tracker), f"run.trackers.{name}", tracker,
            "a Tracker, such as TensorBoard() or WeightsAndBiases(), or None", _CHANGE,
        )
        require(
            tracker is None or tracker.every is None or is_whole(tracker.every),
            f"run.trackers.{name}.every", tracker and tracker.every,
            "a number of steps, 1 or more, or None", _CHANGE,
        )
