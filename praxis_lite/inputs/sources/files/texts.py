"""Decodes and validates untrusted text."""

import codecs
from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.inputs.sources.faults import BadExample

# Byte order marks of other encodings. UTF-32 is first, because UTF-32's mark starts with UTF-16's.
_FOREIGN_BOMS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def decode_utf8(data: bytes, where: str, *, is_file: bool = False) -> str:
    """Decodes UTF-8 and removes a leading byte order mark.

    Args:
      data: The bytes to decode.
      where: Location of the bytes for error messages: "file:line", or the name of the file.
      is_file: Whether `data` is a complete file. The line is then appended to `where` in the error
        message.

    Raises:
      BadExample: (`not_utf8`) The bytes have a different encoding, or contain NUL bytes, which
        occur in UTF-16 and in sparse files.
    """
    encoding = next((name for bom, name in _FOREIGN_BOMS.items() if data.startswith(bom)), None)
    offset = data.find(b"\0")
    if encoding is not None:
        found, offset = f"is not UTF-8: it starts with the byte order mark of {encoding}", 0
        fix = f"Convert it with iconv -f {encoding} -t UTF-8."
    elif offset >= 0:
        found = f"is not UTF-8 text: it contains a NUL at byte {offset}"
        fix = "Remove binary data, or convert UTF-16 with iconv -f UTF-16LE -t UTF-8."
    else:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            found, offset = f"is not UTF-8: {error}", error.start
            fix = "Convert it to UTF-8, for example with iconv -f LATIN1 -t UTF-8."
    line = f":{data.count(10, 0, offset) + 1}" if is_file else ""
    raise BadExample("not_utf8", f"{where}{line}", found, fix)


def require_valid_unicode(text: str, where: str, name: str = "text") -> str:
    """Returns `text`, or raises an error if it contains surrogates, which UTF-8 cannot encode.

    Args:
      text: The text to check.
      where: Location of the text for error messages.
      name: Name of the text for error messages.

    Raises:
      BadExample: (`not_utf8`) The text contains an unpaired surrogate, for example from a JSON
        escape.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python represents undecodable bytes from the command line or the terminal as surrogates.
        is_byte = 0xDC80 <= code <= 0xDCFF
        found = (
            f"the byte 0x{code - 0xDC00:02x}" if is_byte else f"the unpaired surrogate \\u{code:x}"
        )
        raise BadExample(
            "not_utf8",
            where,
            f"has a {name} that is not UTF-8: it contains {found}",
            "Write it as valid UTF-8.",
        ) from None
    return text


def to_json_value(value: Any, where: str) -> Any:
    """Converts a value from any file format to JSON types, and validates its text.

    Bytes are decoded to text; arrays and tuples become lists.

    Args:
      value: The value to convert.
      where: Location of the value for error messages.

    Raises:
      BadExample: A string is not valid UTF-8 (`not_utf8`), or the value is nested too deeply
        (`not_json`).
    """
    try:
        return _to_json_value(value, where)
    except RecursionError:
        raise BadExample(
            "not_json", where, "is nested too deeply", "Reduce the nesting of its lists."
        ) from None


def _to_json_value(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return require_valid_unicode(value, where)
    if isinstance(value, bytes):
        return decode_utf8(value, where)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
        return _to_json_value(value, where) if isinstance(value, list | bytes) else value
    if isinstance(value, list | tuple):
        return [_to_json_value(child, where) for child in value]
    if isinstance(value, Mapping):
        return {
            _to_json_value(name, where): _to_json_value(child, where)
            for name, child in value.items()
        }
    return value
