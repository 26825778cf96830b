"""How does a model continue prompts?

A decoder says how a token is chosen and when a row ends. Never sees a dataset, a mesh or a
checkpoint.
"""

from praxis_lite.decode.beam_search import BeamSearch
from praxis_lite.decode.decoder import Decoder
from praxis_lite.decode.pax_form import pax_outputs
from praxis_lite.decode.sampling import Greedy, Sample

__all__ = ["BeamSearch", "Decoder", "Greedy", "Sample", "pax_outputs"]
