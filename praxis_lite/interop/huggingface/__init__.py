"""Models of Hugging Face in Python: `load(DIRECTORY, mesh)`, `load_tokenizer(DIRECTORY)`.

Each name below is imported when it is first used.
"""

import importlib
from typing import Any

_HOMES = {
    "HuggingFaceModel": "praxis_lite.interop.huggingface.model",
    "load": "praxis_lite.interop.huggingface.model",
    "load_tokenizer": "praxis_lite.inputs.tokenizers",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
