"""praxis_lite: models written for one device, run on any mesh.

The names below are loaded on first use, so that `import praxis_lite` and the errors of a mistyped
command cost no import of jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from praxis_lite.errors import ConfigError
    from praxis_lite.experiment import Experiment, RunConfig
    from praxis_lite.registry import register
    from praxis_lite.sharding import MeshConfig
    from praxis_lite.trained_model import TrainedModel, load

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "Experiment", "MeshConfig", "RunConfig", "TrainedModel", "load", "register",
]  # fmt: skip

_MODULE_OF = {
    "ConfigError": "praxis_lite.errors",
    "Experiment": "praxis_lite.experiment",
    "MeshConfig": "praxis_lite.sharding",
    "RunConfig": "praxis_lite.experiment",
    "TrainedModel": "praxis_lite.trained_model",
    "load": "praxis_lite.trained_model",
    "register": "praxis_lite.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'praxis_lite' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
