"""How is a model of Linen, or of plain functions, a `Model`?

One of NNX is `praxis_lite.core.NnxModel`. Never sees a device, a task or what the model computes.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
