"""Images of strangers: decoded by Pillow's readers of common formats, and turned as they say."""

import io
import struct
import zlib
from typing import Any

import numpy as np

from praxis_lite.host.optional_packages import optional_module

# Pillow's other readers are rarely tried, and that of PostScript starts another program.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
_ORIENTATION = 0x0112  # Of EXIF.


def image_of(data: bytes) -> Any:
    """Decodes an image to a `PIL.Image.Image`, upright as its EXIF data say.

    Raises:
      ValueError: it is damaged, cut off, of another format, or too large; says so.
    """
    Image = _pillow()  # noqa: N806 - as Pillow writes it.
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _require_size(image)
        image.load()
    except Image.UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise ValueError(f"it begins {data[:8]!r}, as no whole image of {formats} does") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(str(error)) from None
    # Pillow raises whatever comes of damage.
    except (
        OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, KeyError, IndexError,
        TypeError, AttributeError, OverflowError, MemoryError, RuntimeError,
    ) as error:
        raise ValueError(str(error) or type(error).__name__) from None
    return _upright(image)


def _pillow() -> Any:
    return optional_module("PIL.Image", "An image")


def _require_size(image: Any) -> None:
    (width, height), most = image.size, _pillow().MAX_IMAGE_PIXELS
    if most is not None and width * height > most:
        raise ValueError(
            f"it has {width:,} x {height:,} pixels; wanted are at most {most:,} in all "
            "(PIL.Image.MAX_IMAGE_PIXELS)"
        )


def _upright(image: Any) -> Any:
    Transpose = _pillow().Transpose  # noqa: N806
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION))
    except Exception:  # Damaged EXIF data say nothing, and the pixels are whole.
        return image
    return image if turn is None else image.transpose(turn)


def rgb_pixels(image: Any) -> np.ndarray:
    """Returns uint8[height, width, 3] of an image of Pillow's.

    Transparency is left out, of 16 bits the upper 8 are taken, grey is red, green and blue alike,
    a palette's colours are looked up, and of CMYK comes what Pillow makes of it.

    Raises:
      ValueError: white has no one number in its mode.
    """
    if image.mode.startswith("I;16"):  # Pillow would make white of all above 255.
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=-1)
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels, of mode {image.mode}, have neither 8 nor 16 bits")
    if image.mode != "RGB":
        image.info.pop("transparency", None)  # Pillow would warn of a palette's.
        image = image.convert("RGB")
    return np.asarray(image)
