"""What counts as text: the bytes and strings of others are checked here, and nowhere else."""

import codecs
from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.inputs.sources.faults import BadExample

# Byte order marks of what is not UTF-8; those of UTF-32 begin as those of UTF-16 do.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}


def decoded(data: bytes, where: str, *, is_file: bool = False) -> str:
    """Returns the text of bytes in UTF-8, without a byte order mark before it.

    Args:
      where: for messages: "file:line", or of a whole file its name.
      is_file: True: the line is added.

    Raises:
      BadExample: `not_utf8`: the bytes are in another encoding, or have a NUL, as text in UTF-16
        and files with holes do.
    """
    kind = next((kind for mark, kind in _OTHER_MARKS.items() if data.startswith(mark)), None)
    place = data.find(b"\0")
    if kind is not None:
        result, place = f"is not UTF-8: it begins as {kind} does", 0
        fix = f"Write it in UTF-8: iconv -f {kind} -t UTF-8."
    elif place >= 0:
        result = f"is not UTF-8 text: it has a NUL at byte {place}"
        fix = (
            "Write it in UTF-8 (iconv -f UTF-16LE -t UTF-8, if it is UTF-16), or remove what is "
            "no text."
        )
    else:
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            result, place = f"is not UTF-8: {error}", error.start
            fix = "Write it in UTF-8 (iconv -f LATIN1 -t UTF-8, if it is Latin-1)."
    line = f":{data.count(10, 0, place) + 1}" if is_file else ""
    raise BadExample("not_utf8", f"{where}{line}", result, fix)


def checked(text: str, where: str, what: str = "text") -> str:
    """Returns a text of whole characters.

    Args:
      what: the text is, for messages.

    Raises:
      BadExample: `not_utf8`: it has half of a character, as JSON may.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python keeps so what a command line or a terminal gave.
        is_byte = 0xDC80 <= code <= 0xDCFF
        half = f"the byte 0x{code - 0xDC00:02x}" if is_byte else f"half of a character, \\u{code:x}"
        raise BadExample(
            "not_utf8", where, f"has a {what} that is not UTF-8: it has {half}",
            "Write whole characters in UTF-8.",
        ) from None
    return text


def plain(value: Any, where: str) -> Any:
    """Returns a value of any format as JSON has it, with whole characters in all its texts.

    Bytes become text, and arrays and tuples lists.

    Raises:
      BadExample: `not_utf8`, as `decoded` and `checked`; `not_json`: it is nested too deeply.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise BadExample(
            "not_json", where, "is nested too deeply", "Write lists in fewer lists."
        ) from None


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return checked(value, where)
    if isinstance(value, bytes):
        return decoded(value, where)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
        return _plain(value, where) if isinstance(value, list | bytes) else value
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping):
        return {_plain(name, where): _plain(element, where) for name, element in value.items()}
    return value
