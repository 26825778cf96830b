"""Folders of files that are an example each: texts, images."""

import abc
import dataclasses
import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, did_you_mean, few, require, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import (
    Example,
    GlobSource,
    Part,
    ranges_of_parts,
    unreadable,
)
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.texts import decoded


@dataclasses.dataclass(eq=False)
class _FilePerExample(GlobSource):
    """Source over files, sorted by name: each file is an example.

    They are listed, not read, when the source is first used; a file that has another size or time
    of change when it is read is refused by name. The fingerprint has names and sizes.
    """

    @abc.abstractmethod
    def decoded(self, data: bytes, path: str) -> Example:
        """Returns the example of a file's bytes."""

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
            raise unreadable(path, error) from None
        return self.decoded(data, path)

    def where(self, index: int) -> str:
        return self.paths[index]

    def name_of(self, path: str) -> str:
        """Returns a file's name, below the folder that all have in common."""
        return os.path.relpath(os.path.abspath(path), self._root)

    def parts(self) -> list[Part]:
        result = []
        for start, stop in ranges_of_parts(len(self)):
            # With times, for a text may be corrected without another size.
            text = repr([
                (self.name_of(path), *state)
                for path, state in zip(self.paths[start:stop], self.states[start:stop], strict=True)
            ])
            name = f"files.{xxhash.xxh3_64_hexdigest(text.encode())}.{start}"
            result.append(Part(start, stop, name))
        return result

    def cache_folder(self) -> str:
        return os.path.expanduser(self.cache_dir or os.path.join(self._root, ".praxis_lite"))

    def fingerprint(self) -> dict[str, Any]:
        names = [
            [self.name_of(path), state.size]
            for path, state in zip(self.paths, self.states, strict=True)
        ]
        return {
            "source": type(self).__name__, "skip": sorted(self.skip), "files": len(names),
            "names_and_sizes": xxhash.xxh3_128_hexdigest(repr(names).encode()),
        }


class TextFiles(_FilePerExample):
    """A text per file: {"name": ..., "text": ...}; UTF-8.

    Args:
      files, skip, cache_dir: as of all sources of files.
    """

    def decoded(self, data: bytes, path: str) -> Example:
        return {"name": self.name_of(path), "text": decoded(data, path, is_file=True)}


@dataclasses.dataclass(eq=False)
class ImageFiles(_FilePerExample):
    """An image per file: {"name", "image": uint8 [height, width, 3], "label": int32}.

    The label is the number of the file's folder among the classes. They are those of training: a
    split that lacks some of them is given the same names, or its labels would be others. Images
    that are to share a batch are brought to one size by a transform.

    All formats of Pillow are read, turned upright as EXIF says.

    Args:
      files, skip, cache_dir: as of all sources of files.
      classes: the names of the folders, in the order of their labels; or the ImageFiles of
        training, whose classes are taken. None: the folders that hold images, sorted.
    """

    needed_package = "PIL"

    classes: "Sequence[str] | ImageFiles | None" = None

    def check(self) -> None:
        super().check()
        if self.classes is not None and not isinstance(self.classes, ImageFiles):
            require(
                isinstance(self.classes, Sequence) and not isinstance(self.classes, str)
                and all(isinstance(cls_name, str) for cls_name in self.classes)
                and len(set(self.classes)) == len(self.classes) > 0,
                f"{type(self).__name__}.classes", self.classes,
                "a list of the names of folders, each once",
            )
        if self.classes is not None:
            for path in self._one_of_each_folder:
                self._label(path)

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, by their labels."""
        if isinstance(self.classes, ImageFiles):
            return self.classes.class_names
        if self.classes is not None:
            return tuple(self.classes)
        return tuple(sorted(set(map(_folder_of, self._one_of_each_folder))))

    @property
    def _one_of_each_folder(self) -> list[str]:
        return list({os.path.dirname(path): path for path in self.paths}.values())

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        return {"label": self.class_names}

    @functools.cached_property
    def _label_of(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.class_names)}

    def _label(self, path: str) -> int:
        name = _folder_of(path)
        if name not in self._label_of:
            raise ConfigError(
                f"{path} is in the folder {shown(repr(name))}, which is none of the classes: "
                f"{few(self.class_names, 10)}.{did_you_mean(name, self.class_names)} Add it to "
                f"{type(self).__name__}.classes, of training as well, or leave it out of files."
            )
        return self._label_of[name]

    def decoded(self, data: bytes, path: str) -> Example:
        return {
            "name": self.name_of(path), "image": _rgb_pixels(data, path),
            "label": np.int32(self._label(path)),
        }

    def fingerprint(self) -> dict[str, Any]:
        named = {} if self.classes is None else {"classes": list(self.class_names)}
        return super().fingerprint() | named


def _folder_of(path: str) -> str:
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def _rgb_pixels(data: bytes, path: str) -> np.ndarray:
    """Returns uint8[height, width, 3] of an image, upright.

    Transparency is left out, of 16 bits the upper 8 are taken, and Pillow converts the other modes.
    Raises BadExample for a damaged image, and for one of 32 bits, where white has no one number.
    """
    pillow, operations = optional_module("PIL.Image", path), optional_module("PIL.ImageOps", path)
    try:
        image = operations.exif_transpose(pillow.open(io.BytesIO(data)))
        if image.mode.startswith("I;16"):  # Pillow would make white of all above 255.
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=-1)
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels, of mode {image.mode}, have neither 8 nor 16 bits")
        if image.mode != "RGB":
            image.info.pop("transparency", None)  # Pillow would warn of a palette's.
        return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow raises errors of many kinds where an image is damaged.
        raise BadExample(
            "damaged", path,
            f"cannot be read as an image: {shown(str(error) or type(error).__name__, 300)}",
            "Make or copy it again.",
        ) from None
