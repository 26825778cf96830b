"""Sources over folders of text files or images, with one example per file."""

import abc
import dataclasses
import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, did_you_mean, first_few, require, shortened
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import (
    Example,
    GlobSource,
    Part,
    ranges_of_parts,
    unreadable_file,
)
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.texts import decode_utf8


@dataclasses.dataclass(eq=False)
class _FilePerExample(GlobSource):
    """Base class of sources with one example per file, sorted by file name.

    On first use, the files are listed but not read. Reading a file whose size or modification time
    has changed since then raises an error. The fingerprint covers only names and sizes.
    """

    @abc.abstractmethod
    def decode(self, data: bytes, path: str) -> Example:
        """Converts a file's bytes to an example."""

    @functools.cached_property
    def _root(self) -> str:
        return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in self.paths])

    def check(self) -> None:
        super().check()
        _ = self.states

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Example:
        path = self.paths[index]
        self.require_unchanged(index)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise unreadable_file(path, error) from None
        return self.decode(data, path)

    def where(self, index: int) -> str:
        return self.paths[index]

    def name_of(self, path: str) -> str:
        """Returns a file's path relative to the common folder of all files."""
        return os.path.relpath(os.path.abspath(path), self._root)

    def parts(self) -> list[Part]:
        parts = []
        for start, stop in ranges_of_parts(len(self)):
            # Include modification times: a corrected text may have the same size.
            text = repr(
                [
                    (self.name_of(path), *state)
                    for path, state in zip(
                        self.paths[start:stop], self.states[start:stop], strict=True
                    )
                ]
            )
            name = f"files.{xxhash.xxh3_64_hexdigest(text.encode())}.{start}"
            parts.append(Part(start, stop, name))
        return parts

    def cache_folder(self) -> str:
        return os.path.expanduser(self.cache_dir or os.path.join(self._root, ".praxis_lite"))

    def fingerprint(self) -> dict[str, Any]:
        names = [
            [self.name_of(path), state.size]
            for path, state in zip(self.paths, self.states, strict=True)
        ]
        return {
            "source": type(self).__name__,
            "skip": sorted(self.skip),
            "files": len(names),
            "names_and_sizes": xxhash.xxh3_128_hexdigest(repr(names).encode()),
        }


class TextFiles(_FilePerExample):
    """A source over UTF-8 text files, with one example {"name": ..., "text": ...} per file.

    Args:
      files: Comma-separated globs; `**` and `~` are expanded.
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted.
      cache_dir: Folder for data derived from the files. If None, `.praxis_lite` in the common
        folder of all files.
    """

    def decode(self, data: bytes, path: str) -> Example:
        return {"name": self.name_of(path), "text": decode_utf8(data, path, is_file=True)}


@dataclasses.dataclass(eq=False)
class ImageFiles(_FilePerExample):
    """A source over image files, labeled by the names of their folders.

    Examples are {"name": str, "image": uint8[height, width, 3], "label": int32}. The label is the
    index of the file's folder in `classes`. Pass the classes of the training split to all other
    splits; otherwise, a split that lacks a class would number the remaining classes differently.
    Use a transform to resize images to the same shape before batching.

    All image formats of Pillow are supported. Images are rotated according to their EXIF
    orientation.

    Args:
      files: Comma-separated globs; `**` and `~` are expanded.
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted.
      cache_dir: Folder for data derived from the files. If None, `.praxis_lite` in the common
        folder of all files.
      classes: Folder names in the order of their labels, or the training split's ImageFiles to use
        the same classes. If None, the folder names of all files, sorted.
    """

    needed_package = "PIL"

    classes: "Sequence[str] | ImageFiles | None" = None

    def check(self) -> None:
        super().check()
        if self.classes is not None and not isinstance(self.classes, ImageFiles):
            require(
                isinstance(self.classes, Sequence)
                and not isinstance(self.classes, str)
                and all(isinstance(name, str) for name in self.classes)
                and len(set(self.classes)) == len(self.classes) > 0,
                f"{type(self).__name__}.classes",
                self.classes,
                "a list of distinct folder names",
            )
        if self.classes is not None:
            for path in self._one_path_per_folder:
                self._label(path)

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The class names in the order of their labels."""
        if isinstance(self.classes, ImageFiles):
            return self.classes.class_names
        if self.classes is not None:
            return tuple(self.classes)
        return tuple(sorted(set(map(_folder_name, self._one_path_per_folder))))

    @property
    def _one_path_per_folder(self) -> list[str]:
        return list({os.path.dirname(path): path for path in self.paths}.values())

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        return {"label": self.class_names}

    @functools.cached_property
    def _labels_by_class(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.class_names)}

    def _label(self, path: str) -> int:
        name = _folder_name(path)
        if name not in self._labels_by_class:
            raise ConfigError(
                f"{path} is in the folder {shortened(repr(name))}, but the classes are "
                f"{first_few(self.class_names, 10)}.{did_you_mean(name, self.class_names)} Add it "
                f"to {type(self).__name__}.classes of all splits, or exclude it from `files`."
            )
        return self._labels_by_class[name]

    def decode(self, data: bytes, path: str) -> Example:
        return {
            "name": self.name_of(path),
            "image": _rgb_pixels(data, path),
            "label": np.int32(self._label(path)),
        }

    def fingerprint(self) -> dict[str, Any]:
        classes = {} if self.classes is None else {"classes": list(self.class_names)}
        return super().fingerprint() | classes


def _folder_name(path: str) -> str:
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def _rgb_pixels(data: bytes, path: str) -> np.ndarray:
    """Decodes an image to uint8[height, width, 3], rotated upright.

    Transparency is dropped, 16-bit pixels keep their upper 8 bits, and Pillow converts other modes.

    Raises:
      BadExample: The image is damaged, or has 32 bits per pixel, a mode without a standard value
        for white.
    """
    pillow, operations = optional_module("PIL.Image", path), optional_module("PIL.ImageOps", path)
    try:
        image = operations.exif_transpose(pillow.open(io.BytesIO(data)))
        if image.mode.startswith("I;16"):  # Pillow's conversion would clip all values above 255.
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=-1)
        if image.mode in ("I", "F"):
            raise ValueError(f"pixels of mode {image.mode} have neither 8 nor 16 bits")
        if image.mode != "RGB":
            image.info.pop("transparency", None)  # Avoid a warning about transparent palettes.
        return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow raises many kinds of errors for damaged images.
        raise BadExample(
            "damaged",
            path,
            f"cannot be read as an image: {shortened(str(error) or type(error).__name__, 300)}",
            "Write or copy it again.",
        ) from None
