"""Models of Hugging Face: read from their files, trained on any mesh, written as their files.

Which field and which tensor of theirs is what of ours stands in `families/`, a table per family.
It never imports transformers or torch.
"""

from praxis_lite.interop.huggingface.model import HuggingFaceModel, load

__all__ = ["HuggingFaceModel", "load"]
