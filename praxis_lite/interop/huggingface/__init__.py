"""Models of Hugging Face in Python: `load(DIRECTORY, mesh)`."""

from praxis_lite.interop.huggingface.model import HuggingFaceModel, load

__all__ = ["HuggingFaceModel", "load"]
