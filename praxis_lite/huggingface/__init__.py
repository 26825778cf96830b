"""Hugging Face models: read, exported, trained as jobs, and used in Python (`load`).

`families/` has a table per family that maps fields to settings and tensors to weights. Never
imports transformers or torch.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
