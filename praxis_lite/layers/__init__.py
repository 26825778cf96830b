"""Layers: the maths of a single device, and declarations of how arrays split.

Begin with `base/base_layer.py` and `linears.py`. Layers know no device, padding, task or optimizer.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
