"""Datasets that another library has prepared on disk: TFDS, Hugging Face."""

import abc
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import xxhash

from praxis_lite.core.errors import ConfigError, did_you_mean, shown
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example, Part, Source, ranges_of_parts, settings_alone
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.inside import file_inside, json_inside
from praxis_lite.inputs.sources.files.saved_dataset import SavedDataset, saved_dataset
from praxis_lite.inputs.sources.files.tfds_features import (
    decode_images_safely,
    require_own_features,
)
from praxis_lite.inputs.sources.record_files import RecordFile


@dataclasses.dataclass(eq=False)
class _Prepared(Source):
    """A dataset that is prepared, in a folder."""

    path: str
    split: str | None = None
    _: dataclasses.KW_ONLY
    skip: tuple[str, ...] = ()
    cache_dir: str | None = None

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """Identifies the examples: another version has other examples."""

    def check(self) -> None:
        super().check()
        if not len(self):
            raise ConfigError(f"{self.location} has no examples. Leave the source out.")

    @property
    def location(self) -> str:
        return f"{self.path}, {self.split}" if self.split else self.path

    @property
    def folder(self) -> Path:
        """Where the dataset lies."""
        return Path(self.path).expanduser()

    def where(self, index: int) -> str:
        return f"{self.location}, row {index}"

    def parts(self) -> list[Part]:
        return [
            Part(start, stop, f"{self.split or 'all'}.{self.version}.{start}".replace("/", "_"))
            for start, stop in ranges_of_parts(len(self))
        ]

    def cache_folder(self) -> str:
        return str(Path(self.cache_dir or Path(self.path) / ".praxis_lite").expanduser())

    def fingerprint(self) -> dict[str, Any]:
        return {
            "source": type(self).__name__, "skip": sorted(self.skip), "split": self.split,
            "version": self.version, "examples": len(self),
        }

    def __getstate__(self) -> dict[str, Any]:
        return settings_alone(self)


class HuggingFaceDataset(_Prepared):
    """The rows of a dataset that `datasets` wrote with `save_to_disk`; lists become arrays.

    Only files in the folder are read. An image is one of Pillow's, made of the bytes in its row and
    turned upright; sounds and films are the bytes and the path that their row has.

    Args:
      path: the folder.
      split: of a DatasetDict; None: the folder holds one dataset.
      skip: names of FAULTS: examples with one are left out and counted.
      cache_dir: where what is derived is kept. None: `.praxis_lite` in the folder.
    """

    @functools.cached_property
    def saved(self) -> SavedDataset:
        """The split's rows, opened. Raises ConfigError."""
        return saved_dataset(self.folder, self.split)

    @property
    def version(self) -> str:
        return self.saved.fingerprint

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        return self.saved.classes

    def __len__(self) -> int:
        return self.saved.num_rows

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.saved.row(int(index), self.where(index))


class Tfds(_Prepared):
    """The examples of a dataset of TFDS, prepared in the format array_record.

    Args:
      path: the folder of a version of the dataset, such as ~/tensorflow_datasets/mnist/3.0.1.
      split: as TFDS writes it: "train", "train[:90%]".
      skip: names of FAULTS: examples with one are left out and counted.
      cache_dir: where what is derived is kept. None: `.praxis_lite` in the folder.
    """

    @functools.cached_property
    def _builder(self) -> Any:
        tfds = optional_module("tensorflow_datasets", "Tfds")
        if not os.path.lexists(self.folder / "dataset_info.json"):
            raise ConfigError(
                f"{self.folder} holds no dataset of TFDS, which has a dataset_info.json. Name the "
                "folder of a version of a dataset."
            )
        for name in sorted(os.listdir(self.folder)):  # TFDS reads names of labels, too.
            path = self.folder / name
            if not name.startswith(".") and (path.is_symlink() or not path.is_dir()):
                file_inside(self.folder, name, "the folder")
        json_inside(self.folder, "dataset_info.json")
        require_own_features(self.folder)
        try:
            result = tfds.builder_from_directory(str(self.folder))
            decode_images_safely(result.info.features)
        except ConfigError:
            raise
        except Exception as error:  # TFDS raises whatever comes of what it reads.
            raise ConfigError(
                f"{self.folder} holds no dataset of TFDS: {shown(str(error), 300)}. Name the "
                "folder of a version, with its dataset_info.json."
            ) from None
        return result

    @functools.cached_property
    def dataset(self) -> Any:
        known = sorted(self._builder.info.splits)
        if self.split is None or self.split.partition("[")[0] not in known:
            raise ConfigError(
                f"Tfds.split is {self.split!r}; {self.path} has {known}."
                f"{did_you_mean(str(self.split), known)}"
            )
        if self._builder.info.file_format.value != "array_record":
            raise ConfigError(
                f"{self.path} is in the format {self._builder.info.file_format.value}, in which "
                "no example is found by its number. Prepare it as array_record (tfds build "
                "--file_format=array_record, or tfds convert_format), or give it to FromDataset."
            )
        self._require_whole_files()
        try:
            return self._builder.as_data_source(self.split)
        except Exception as error:
            raise ConfigError(
                f"Tfds.split is {self.split!r}: {shown(str(error).split(chr(10))[0], 300)} Write "
                f"{known[0]!r} or {f'{known[0]}[:90%]'!r}, say."
            ) from None

    def _require_whole_files(self) -> None:
        """Raises ConfigError for shards elsewhere, or cut off, where TFDS would read zeros."""
        split = self._builder.info.splits[self.split.partition("[")[0]]
        for path, expected in zip(split.filepaths, split.shard_lengths, strict=True):
            name = os.path.relpath(path, self.folder) if path.is_relative_to(self.folder) else path
            try:
                actual = len(RecordFile(file_inside(self.folder, str(name), "dataset_info.json")))
            except RuntimeError as error:
                actual = f"cannot be read ({error})"
            if actual != expected:
                raise ConfigError(
                    f"{path} {actual if isinstance(actual, str) else f'has {actual:,} records'}; "
                    f"wanted are {expected:,} records, as its dataset_info.json says. Copy or "
                    "prepare the dataset again."
                )

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        label = optional_module("tensorflow_datasets.core.features", "Tfds").ClassLabel
        features = self._builder.info.features
        items = features.items() if hasattr(features, "items") else ()
        return {name: tuple(item.names) for name, item in items if isinstance(item, label)}

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def version(self) -> str:
        info = self._builder.info
        split = info.splits[self.split.partition("[")[0]]
        digest = xxhash.xxh3_64_hexdigest(f"{split.shard_lengths} {split.num_bytes}".encode())
        return f"{info.name}-{info.version}-{digest}"

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        try:
            return self.dataset[int(index)]
        except Exception as error:  # TFDS raises whatever comes of a damaged record.
            raise BadExample(
                "damaged", f"{self.where(index)},",
                f"cannot be read: {shown(str(error) or type(error).__name__, 300)}",
                "Copy or prepare the dataset again.",
            ) from None
