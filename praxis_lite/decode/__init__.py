"""Decoding: how continuations are chosen, and the loops around a cached model."""

from praxis_lite.decode.beam_search import BeamSearch
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.pax_form import pax_outputs
from praxis_lite.decode.sampling import Greedy, Sample

__all__ = ["BeamSearch", "Decoder", "Greedy", "Sample", "pax_outputs"]
