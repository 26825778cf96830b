# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.inputs.tokenizers.loading import load_tokenizer as load_tokenizer
from praxis_lite.tools.huggingface.decoder import lm_config as lm_config
from praxis_lite.tools.huggingface.decoder_settings import DecoderSettings as DecoderSettings
from praxis_lite.tools.huggingface.family import settings_in as settings_in
from praxis_lite.tools.huggingface.jobs import export_job as export_job
from praxis_lite.tools.huggingface.model import HuggingFaceModel as HuggingFaceModel
from praxis_lite.tools.huggingface.model import load as load
