"""Models of Hugging Face: on disk, in a job, and in Python: `load(DIRECTORY, mesh)`.

Which field and which tensor is what of ours is said in `families/`, a table per family. Never
imports transformers or torch.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
