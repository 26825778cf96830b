"""How text becomes the ids of a model and ids become text again; nothing here knows a model.

    python -m praxis_lite.inputs.tokenizers train --help    # makes one of your own text
    python -m praxis_lite.inputs.tokenizers show DIR        # special tokens, and what ends a text

Each name below is imported when it is first used, and `tokenizers`, `sentencepiece` and `jinja2`
when a tokenizer reads its files.
"""

import importlib
from typing import Any

_HOMES = {
    "Tokenizer": "base",
    "ByteTokenizer": "plain",
    "TokenIds": "plain",
    "JsonTokenizer": "json_tokenizer",
    "SentencePieceTokenizer": "sentencepiece_tokenizer",
    "as_tokenizer": "loading",
    "load_tokenizer": "loading",
    "StreamingDecoder": "streaming",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
