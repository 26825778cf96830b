"""Loads the tools for training jobs from praxis_lite and from an installed package."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError
from praxis_lite.trainer.job_tools import JobTools

if TYPE_CHECKING:
    from praxis_lite.checkpoints.init.initial_state import InitialState
    from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
    from praxis_lite.core.partitioner.train_state import StateLayout


def installed_job_tools() -> JobTools:
    """Returns the tools from the entry point in the group `praxis_lite.job_tools`, if any.

    praxis_lite's sources of initial states are always included.

    Raises:
      ConfigError: Several packages have such an entry point.
    """
    points = tuple(importlib.metadata.entry_points(group="praxis_lite.job_tools"))
    if len(points) > 1:
        raise ConfigError(
            "The entry points praxis_lite.job_tools are "
            f"{', '.join(sorted(point.value for point in points))}; expected only one, because a "
            "training job cannot combine the tools of several packages. Uninstall the others."
        )
    tools = points[0].load() if points else JobTools()
    return dataclasses.replace(tools, sources={**_SOURCES, **tools.sources})


def _from_huggingface(directory: str, layout: "StateLayout") -> "InitialState":
    from praxis_lite.huggingface.pretrained import FromHuggingFace

    return FromHuggingFace(directory, layout)


def _from_checkpoints(
    rules: "Mapping[str, CheckpointLoadingRules]", layout: "StateLayout"
) -> "InitialState":
    from praxis_lite.checkpoints.init.init_from_checkpoint import FromCheckpoints

    return FromCheckpoints(rules, layout)


# Sources of initial states, by the name of the `run` setting that selects the source.
_SOURCES = {
    "init_from_checkpoint_rules": _from_checkpoints,
    "init_from_huggingface": _from_huggingface,
}
