"""Decoders: how a model continues prompts.

A decoder decides how tokens are chosen and when a row ends. It never sees a dataset, a mesh or a
checkpoint.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
