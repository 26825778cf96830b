"""Weights, checkpoints and jobs of Pax as ours, and weights back."""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
