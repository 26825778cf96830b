"""Layers: single-device computations, and declarations of how their arrays are split.

Start reading at `base/base_layer.py` and `linears.py`. Layers do not depend on devices, padding,
tasks or optimizers.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
