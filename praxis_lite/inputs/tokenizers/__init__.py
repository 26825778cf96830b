"""How text becomes the ids of a model and ids become text again; nothing here knows a model.

    python -m praxis_lite.inputs.tokenizers train --help    # makes one of your own text
    python -m praxis_lite.inputs.tokenizers show DIR        # special tokens, and what ends a text

`tokenizers`, `jinja2` and, for directories without a plain tokenizer.json, `transformers` are
imported when a tokenizer reads its files.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
