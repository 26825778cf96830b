"""praxis_lite: models written for a single device, run on any mesh.

The names below are loaded on first use, so that `import praxis_lite` and the errors of a mistyped
command cost no import of jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
    from praxis_lite.checkpoints.steps.best_checkpoints import BestCheckpoints
    from praxis_lite.errors import ConfigError
    from praxis_lite.experiment.early_stopping import EarlyStopping
    from praxis_lite.experiment.experiment import Experiment, Job
    from praxis_lite.experiment.registry import register
    from praxis_lite.experiment.run_config import RunConfig
    from praxis_lite.interop.trained_model import TrainedModel, load
    from praxis_lite.sharding import MeshConfig
    from praxis_lite.task import Task

__version__ = "0.1.0"

_MODULE_OF = {
    "BestCheckpoints": "praxis_lite.checkpoints.steps.best_checkpoints",
    "CheckpointLoadingRules": "praxis_lite.checkpoints.init.loading_rules",
    "ConfigError": "praxis_lite.errors",
    "EarlyStopping": "praxis_lite.experiment.early_stopping",
    "Experiment": "praxis_lite.experiment.experiment",
    "Job": "praxis_lite.experiment.experiment",
    "MeshConfig": "praxis_lite.sharding",
    "RunConfig": "praxis_lite.experiment.run_config",
    "Task": "praxis_lite.task",
    "TrainedModel": "praxis_lite.interop.trained_model",
    "load": "praxis_lite.interop.trained_model",
    "register": "praxis_lite.experiment.registry",
}

__all__ = [
    "BestCheckpoints",
    "CheckpointLoadingRules",
    "ConfigError",
    "EarlyStopping",
    "Experiment",
    "Job",
    "MeshConfig",
    "RunConfig",
    "Task",
    "TrainedModel",
    "load",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'praxis_lite' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
