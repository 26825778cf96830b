# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.inputs.tokenizers.base import Tokenizer as Tokenizer
from praxis_lite.inputs.tokenizers.files import has_tokenizer as has_tokenizer
from praxis_lite.inputs.tokenizers.json_tokenizer import JsonTokenizer as JsonTokenizer
from praxis_lite.inputs.tokenizers.loading import as_tokenizer as as_tokenizer
from praxis_lite.inputs.tokenizers.loading import load_tokenizer as load_tokenizer
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer as ByteTokenizer
from praxis_lite.inputs.tokenizers.plain import CharacterTokenizer as CharacterTokenizer
from praxis_lite.inputs.tokenizers.plain import TokenIds as TokenIds
from praxis_lite.inputs.tokenizers.streaming import StreamingDecoder as StreamingDecoder
