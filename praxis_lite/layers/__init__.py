"""What does a model compute? Maths as of a single device; layers say how their arrays split.

Begin with `base_layer` and `linears`. Never sees a device, padding, a task or an optimizer.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
