"""How is a model of any library init and apply over plain trees?

Never sees a device, a task or what the model computes.
"""

from praxis_lite.models.function_model import FunctionModel
from praxis_lite.models.linen_model import LinenModel
from praxis_lite.models.model import Model
from praxis_lite.models.nnx_model import NnxModel

__all__ = ["FunctionModel", "LinenModel", "Model", "NnxModel"]
