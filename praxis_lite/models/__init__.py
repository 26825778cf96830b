"""Models seen as init and apply over plain trees."""

from praxis_lite.models.model import Model
from praxis_lite.models.nnx_model import NnxModel

__all__ = ["Model", "NnxModel"]
