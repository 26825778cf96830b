"""Loads, trains and exports Hugging Face models, without transformers or torch.

Each TOML file in `families/` describes one model family: it maps fields of config.json to settings
and tensors to weights.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
