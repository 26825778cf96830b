"""The library `tokenizers` and its errors: a file of a stranger never ends the process."""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.tokenizers.files import json_object, read_file

# How many times as long a normalizer may make a text.
MAX_GROWTH = 10_000

# Settings of models with which an encoding is drawn anew each time, and the data would not be what
# its fingerprint says.
_RANDOM = ("dropout", "alpha", "nbest_size")


def read_tokenizer(path: Path) -> Any:
    """Returns the library's tokenizer of a file, without what makes encodings differ.

    Raises:
      ConfigError: the file is absent or damaged.
    """
    # tokenizers: the library that wrote the file; its Rust reads and runs every kind there is.
    tokenizers = optional_module("tokenizers", f"The tokenizer {path}")
    if not os.path.exists(path):
        raise ConfigError(f"The tokenizer has no file {path}. Name its directory.")
    content = read_file(path)
    fault = _fault(json_object(content, path))
    if fault:
        raise _damaged(path, fault)
    with errors_of_rust(path):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for name in _RANDOM:
            value = getattr(tokenizer.model, name, None)
            if value:
                setattr(tokenizer.model, name, None)
                _log.info("%s: %s %s is not followed: a text has one encoding", path, name, value)
        # Some faults show only when a text is encoded; a vocabulary may lack any but this one.
        tokenizer.decode(tokenizer.encode("").ids, skip_special_tokens=False)
    return tokenizer


@contextlib.contextmanager
def errors_of_rust(path: Path) -> Iterator[None]:
    """Turns errors of the library, whose panics are no Exception, into those of a file."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        # The class of a panic has no public name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"The tokenizer's file {path} cannot be read: {shown(fault, 200)}. Let the library "
        "`tokenizers` write it anew."
    )


def _fault(fields: Mapping[str, Any]) -> str:
    """Returns the fault that the library answers with a panic or an endless text; "" if none."""
    model = fields.get("model")
    if isinstance(model, Mapping):
        prefix = model.get("continuing_subword_prefix")
        for merge in _list(model.get("merges")) if isinstance(prefix, str) and prefix else ():
            right = (merge.split(" ") if isinstance(merge, str) else _list(merge))[-1:]
            if right and len(str(right[0]).encode(errors="replace")) < len(prefix.encode()):
                return f"the merge {merge!r} is shorter than continuing_subword_prefix {prefix!r}"
    for step in _steps(fields.get("pre_tokenizer")):
        if step.get("type") == "FixedLength" and not step.get("length"):
            return "the length of FixedLength is 0"
    for step in _steps(fields.get("post_processor")):
        known = step.get("special_tokens")
        for piece in (*_list(step.get("single")), *_list(step.get("pair"))):
            token = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
            name = token.get("id") if isinstance(token, Mapping) else None
            if name is not None and isinstance(known, Mapping) and name not in known:
                return f"its template has {name!r}, which its special_tokens do not have"
    for part in ("normalizer", "decoder"):
        growth = math.prod(map(_growth, _steps(fields.get(part))))
        if growth > MAX_GROWTH:
            return f"its {part} makes a text {growth:.0f} times as long"
    return ""


def _growth(step: Mapping[str, Any]) -> float:
    """Returns the factor by which a replacement lengthens a text, at most."""
    pattern, new = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    if step.get("type") != "Replace" or not isinstance(new, str):
        return 1.0
    return max(1.0, len(new) / len(old) if isinstance(old, str) and old else len(new) + 1)


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a part of the file, those of sequences too."""
    if isinstance(part, Mapping):
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for step in _list(part.get(name)):
                yield from _steps(step)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_log = logging.getLogger(__name__)
