"""Models of Hugging Face in Python: `load(DIRECTORY, mesh)`, `load_tokenizer(DIRECTORY)`."""

from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.interop.huggingface.model import HuggingFaceModel, load

__all__ = ["HuggingFaceModel", "load", "load_tokenizer"]
