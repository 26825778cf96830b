# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.decode.beam_search import BeamSearch as BeamSearch
from praxis_lite.decode.decoder import Decoder as Decoder
from praxis_lite.decode.pax_form import pax_outputs as pax_outputs
from praxis_lite.decode.prefill import cache_length as cache_length
from praxis_lite.decode.sampling import Greedy as Greedy
from praxis_lite.decode.sampling import Sample as Sample
from praxis_lite.decode.stop_strings import continuation_text as continuation_text
from praxis_lite.decode.stop_strings import for_tokenizer as for_tokenizer
from praxis_lite.decode.weight_formats import stored_forms as stored_forms
