# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.inputs.tokenizers.loading import load_tokenizer as load_tokenizer
from praxis_lite.tools.huggingface.model import HuggingFaceModel as HuggingFaceModel
from praxis_lite.tools.huggingface.model import load as load
