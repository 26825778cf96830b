"""Tokenizers, which convert text to token ids and back. This package does not depend on models.

    praxis tokenizers train --help    # trains a tokenizer on your text
    praxis tokenizers show DIR        # lists special tokens and end tokens

The libraries `tokenizers` and `jinja2` are imported when a tokenizer's files are first read, as is
`transformers` for directories that are not in the plain tokenizer.json format.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
