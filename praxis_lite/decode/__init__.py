"""Decoders, which continue prompts with a model.

A decoder decides how tokens are chosen and when a row ends. Decoders do not depend on datasets,
meshes or checkpoints.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
