"""Layers: single-device computations, with declarations of how their arrays are sharded.

To read the code, begin with `base/base_layer.py` and `linears.py`. Layers do not depend on devices,
padding, tasks or optimizers.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
