"""Reads Pax checkpoints, creates jobs from them, and converts weights to and from Pax."""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
