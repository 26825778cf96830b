"""How does a model continue prompts?

A decoder says how a token is chosen and when a row ends. Never sees a dataset, a mesh or a
checkpoint.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
