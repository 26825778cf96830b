"""The library `tokenizers` and its errors: a file of a stranger never ends the process."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from praxis_lite.errors import ConfigError, shown
from praxis_lite.inputs.tokenizers.files import read_file


def read_tokenizer(path: Path) -> Any:
    """Returns the library's tokenizer of a file, without what makes encodings differ.

    Raises:
      ConfigError: the file is absent or damaged.
    """
    # tokenizers: the library that wrote the file; its Rust reads and runs every kind there is.
    from tokenizers import Tokenizer

    if not path.exists():
        raise ConfigError(f"The tokenizer has no file {path}. Name its directory.")
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"The tokenizer's file {path} cannot be read: {error}.") from None
    with errors_of_rust(path):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        dropout = getattr(tokenizer.model, "dropout", None)
        if dropout:
            # A random encoding at each reading: the data would not be what its fingerprint says.
            tokenizer.model.dropout = None
            _log.info("%s: dropout %s is not followed: a text has one encoding", path, dropout)
        # Some faults show only when a text is encoded.
        ids = tokenizer.encode("a b").ids
        tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer


@contextlib.contextmanager
def errors_of_rust(path: Path) -> Iterator[None]:
    """Turns errors of the library, of which panics are no Exception, into those of a file."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        # The class of a panic has no public name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"The tokenizer's file {path} cannot be read: {shown(str(error), 200)}. Let the "
            "library `tokenizers` write it anew."
        ) from None


_log = logging.getLogger(__name__)
