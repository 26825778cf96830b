# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.huggingface.decoder import lm_config as lm_config
from praxis_lite.huggingface.decoder_settings import DecoderSettings as DecoderSettings
from praxis_lite.huggingface.family import settings_in as settings_in
from praxis_lite.huggingface.jobs import export_job as export_job
from praxis_lite.huggingface.model import HuggingFaceModel as HuggingFaceModel
from praxis_lite.huggingface.model import load as load
from praxis_lite.inputs.tokenizers.loading import load_tokenizer as load_tokenizer
