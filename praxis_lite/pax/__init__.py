"""Reads weights and checkpoints of Pax, begins jobs with them, and converts weights back."""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
