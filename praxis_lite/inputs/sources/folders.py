"""Folders of files that are an example each: texts, images."""

import abc
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, did_you_mean, few, format_bytes, require, shown
from praxis_lite.host.optional_packages import require_package
from praxis_lite.inputs.sources.base import (
    Example,
    GlobSource,
    Part,
    ranges_of_parts,
    settings_alone,
)
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import unreadable
from praxis_lite.inputs.sources.files.images import image_of, rgb_pixels
from praxis_lite.inputs.sources.files.paths import matching_files
from praxis_lite.inputs.sources.files.texts import decoded


class _Listed(NamedTuple):
    path: str
    size: int
    mtime_ns: int


@dataclasses.dataclass(eq=False)
class _FilePerExample(GlobSource):
    """Source over files, sorted by name: each file is an example.

    They are listed, not read, when the source is first used; a file that has another size or time
    of change when it is read is refused by name. The fingerprint has names and sizes.
    """

    largest = 4 << 30  # Bytes of a file: a sparse one may seem to have any number.

    @abc.abstractmethod
    def decoded(self, data: bytes, path: str) -> Example:
        """Returns the example of a file's bytes."""

    @functools.cached_property
    def listed(self) -> list[_Listed]:
        """The files, each with its size and time of change."""
        return [
            _Listed(path, (result := os.stat(path)).st_size, result.st_mtime_ns)
            for path in matching_files(self.files, type(self).__name__)
            if ".praxis_lite" not in path.split(os.sep)
        ]

    @functools.cached_property
    def _root(self) -> str:
        return os.path.commonpath([os.path.dirname(os.path.abspath(x.path)) for x in self.listed])

    def check(self) -> None:
        super().check()
        _ = self.listed

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, index: int) -> Example:
        item = self.listed[index]
        if item.size > self.largest:
            raise BadExample(
                "damaged", item.path, f"has {format_bytes(item.size)}; wanted are at most "
                f"{format_bytes(self.largest)} of an example", "Cut it into several files.",
            )
        try:
            with open(item.path, "rb") as file:
                result = os.fstat(file.fileno())
                data = file.read()
        except OSError as error:
            raise unreadable(item.path, error) from None
        if (result.st_size, result.st_mtime_ns) != (item.size, item.mtime_ns):
            raise ConfigError(
                f"{item.path} has changed since it was listed: it had {item.size:,} bytes, and has "
                f"{result.st_size:,} now, or another time of change. Put it back, or launch again, "
                "which compares the data with the checkpoint's."
            )
        return self.decoded(data, item.path)

    def where(self, index: int) -> str:
        return self.listed[index].path

    def has(self, where: str) -> bool:
        return any(where.startswith(item.path) for item in self.listed)

    def name_of(self, path: str) -> str:
        """Returns a file's name, below the folder that all have in common."""
        return os.path.relpath(os.path.abspath(path), self._root)

    def parts(self) -> list[Part]:
        result = []
        for start, stop in ranges_of_parts(len(self)):
            some = self.listed[start:stop]
            # Times, too: a text may be mended without another size.
            text = repr([(self.name_of(item.path), item.size, item.mtime_ns) for item in some])
            name = f"files.{xxhash.xxh3_64_hexdigest(text.encode())}.{start}"
            result.append(Part(start, stop, name))
        return result

    def cache_folder(self) -> str:
        return os.path.expanduser(self.cache_dir or os.path.join(self._root, ".praxis_lite"))

    def fingerprint(self) -> dict[str, Any]:
        names = [[self.name_of(item.path), item.size] for item in self.listed]
        return {
            "source": type(self).__name__, "skip": sorted(self.skip), "files": len(names),
            "names_and_sizes": xxhash.xxh3_128_hexdigest(repr(names).encode()),
        }

    def __getstate__(self) -> dict[str, Any]:
        return settings_alone(self, "listed")


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

    The label is the number of the folder that the file lies in, among the classes. They are those
    of training: a split that lacks some of them is given the same names, or its labels would be
    others. Images that are to share a batch are brought to one size by a transform.

    PNG, JPEG, GIF (the first frame), BMP, WebP, TIFF and PPM are read, turned upright as EXIF says.

    Args:
      files, skip, cache_dir: as of all sources of files.
      classes: the names of the folders, in the order of their labels; or the ImageFiles of
        training, whose classes are taken. None: the folders that hold images, sorted.
    """

    classes: "Sequence[str] | ImageFiles | None" = None

    largest = 1 << 28

    def check(self) -> None:
        require_package("PIL", type(self).__name__)
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
        return list({os.path.dirname(item.path): item.path for item in self.listed}.values())

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        return {"label": self.class_names}

    @functools.cached_property
    def _label_of(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.class_names)}

    def _label(self, path: str) -> int:
        name = _folder_of(path)
        if name not in self._label_of:
            raise ConfigError(
                f"{path} lies in the folder {shown(repr(name))}, which is none of the classes: "
                f"{few(self.class_names, 10)}.{did_you_mean(name, self.class_names)} Add it to "
                f"{type(self).__name__}.classes, of training as well, or leave it out of files."
            )
        return self._label_of[name]

    def decoded(self, data: bytes, path: str) -> Example:
        try:
            pixels = rgb_pixels(image_of(data))
        except ValueError as error:
            raise BadExample(
                "damaged", path, f"cannot be read as an image: {shown(str(error), 300)}",
                "Make or copy it again.",
            ) from None
        return {
            "name": self.name_of(path), "image": pixels, "label": np.int32(self._label(path))
        }

    def fingerprint(self) -> dict[str, Any]:
        named = {} if self.classes is None else {"classes": list(self.class_names)}
        return super().fingerprint() | named


def _folder_of(path: str) -> str:
    return os.path.basename(os.path.dirname(os.path.abspath(path)))
