"""Decoding: how the next token is chosen, and the loop around a cached model."""

from praxis_lite.decode.loop import decode_tokens
from praxis_lite.decode.sampling import Sampling

__all__ = ["Sampling", "decode_tokens"]
