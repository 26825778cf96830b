"""Sources over datasets from Hugging Face's `datasets`, on disk or on the Hub, and from TFDS."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, did_you_mean, shortened
from praxis_lite.host.hub import is_hub_url
from praxis_lite.host.optional_packages import optional_module, require_package
from praxis_lite.host.places import local_folder
from praxis_lite.inputs.mixing.same_classes import class_clashes
from praxis_lite.inputs.sources.base import Example, Part, Source, picklable_state, ranges_of_parts
from praxis_lite.inputs.sources.columnar import without_nulls
from praxis_lite.inputs.sources.copied import import_datasets
from praxis_lite.inputs.sources.faults import BadExample

if TYPE_CHECKING:
    import datasets


@dataclasses.dataclass(eq=False)
class _PreparedDataset(Source):
    """Base class of sources over a folder that a dataset library reads with random access."""

    path: str
    split: str | None = None
    _: dataclasses.KW_ONLY
    skip: tuple[str, ...] = ()
    cache_dir: str | None = None

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """A string that changes when the examples change."""

    @property
    @abc.abstractmethod
    def rows(self) -> Any:
        """The library's object for random access to the examples."""

    @abc.abstractmethod
    def example(self, row: Any) -> Example:
        """Returns the example for a row."""

    def check(self) -> None:
        super().check()
        if not len(self):
            raise ConfigError(f"{self.location} contains no examples. Remove the source.")

    @property
    def location(self) -> str:
        return f"{self.path}, {self.split}" if self.split else self.path

    @property
    def folder(self) -> Path:
        """The folder of the dataset."""
        return Path(self.path).expanduser()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        try:
            return self.example(self.rows[int(index)])
        except Exception as error:  # The libraries raise many kinds of errors for a damaged row.
            raise BadExample(
                "damaged",
                f"{self.where(index)},",
                f"cannot be read: {shortened(str(error) or type(error).__name__, 300)}",
                "Copy or prepare the dataset again.",
            ) from None

    def where(self, index: int) -> str:
        return f"{self.location}, row {index}"

    def parts(self) -> list[Part]:
        return [
            Part(start, stop, f"{self.split or 'all'}.{self.version}.{start}".replace("/", "_"))
            for start, stop in ranges_of_parts(len(self))
        ]

    def cache_folder(self) -> str:
        return str(Path(self.cache_dir or self.folder / ".praxis_lite").expanduser())

    def fingerprint(self) -> dict[str, Any]:
        return {
            "source": type(self).__name__,
            "skip": sorted(self.skip),
            "split": self.split,
            "version": self.version,
            "examples": len(self),
        }

    def __getstate__(self) -> dict[str, Any]:
        return picklable_state(self)


@dataclasses.dataclass(eq=False)
class HuggingFaceDataset(_PreparedDataset):
    """A source over a Hugging Face dataset that was written with `save_to_disk`, or from the Hub.

    Lists of numbers become arrays. Images are decoded with Pillow; audio and video are not decoded,
    but returned as dicts with bytes and path.

    Args:
      path: Folder of the dataset, or hf://datasets/org/name[@revision] on the Hugging Face Hub. All
        files of the repository are downloaded.
      split: Name of the split if the folder contains a DatasetDict, else None.
      name: Name of the configuration of a dataset on the Hub, such as "wikitext-2-raw-v1", or None
        for the default.
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted.
      cache_dir: Folder for data derived from the dataset. If None, `.praxis_lite` in the dataset's
        folder.
    """

    _: dataclasses.KW_ONLY
    name: str | None = None

    @functools.cached_property
    def folder(self) -> Path:
        return local_folder(self.path, None, "dataset")

    @functools.cached_property
    def saved(self) -> "datasets.Dataset":
        """The split in its saved format."""
        library = import_datasets("HuggingFaceDataset")
        try:
            if is_hub_url(self.path):
                loaded = library.load_dataset(str(self.folder), self.name)
            else:
                loaded = library.load_from_disk(str(self.folder))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.folder} is not a complete Hugging Face dataset "
                f"({shortened(str(error), 300)}). Write it with dataset.save_to_disk(path), after "
                "load_dataset for a dataset from the Hub."
            ) from None
        except Exception as error:  # Arrow and JSON raise many kinds of errors for damaged files.
            raise ConfigError(
                f"{self.folder} cannot be read: {shortened(str(error), 300)}. Copy or save the "
                "dataset again."
            ) from None
        splits = loaded if isinstance(loaded, Mapping) else {None: loaded}
        if self.split not in splits:
            known = "no splits" if None in splits else f"the splits {sorted(splits)}"
            raise ConfigError(
                f"HuggingFaceDataset.split is {self.split!r}, but {self.folder} has {known}."
                f"{did_you_mean(str(self.split), [name for name in splits if name])}"
            )
        _require_same_classes(self.folder, splits)
        return splits[self.split]

    @functools.cached_property
    def rows(self) -> "datasets.Dataset":
        library, dataset = import_datasets("HuggingFaceDataset"), self.saved
        dataset = dataset.with_format(None, columns=dataset.format["columns"])
        for name, feature in dataset.features.items():
            if isinstance(feature, library.Audio | library.Video):
                dataset = dataset.cast_column(name, type(feature)(decode=False))
        if "Image(" in repr(dataset.features):
            require_package("PIL", f"{self.folder}, for its images,")
        return dataset

    def example(self, row: Mapping[str, Any]) -> Example:
        return {name: _value(self.rows.features[name], value) for name, value in row.items()}

    @property
    def version(self) -> str:
        if is_hub_url(self.path):
            return (
                f"{self.name or 'default'}-{self.folder.name}"  # The folder's name is the commit.
            )
        return self.saved._fingerprint

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        return _classes(self.saved)


def _value(feature: Any, value: Any) -> Any:
    """Converts a list of numbers to an array, and removes null fields from structs."""
    numbers = getattr(getattr(feature, "feature", None), "pa_type", None)
    types = optional_module("pyarrow.types", "Arrow")
    is_numeric = numbers is not None and types.is_primitive(numbers)
    if numbers is not None and is_numeric and isinstance(value, list) and None not in value:
        return np.array(value, numbers.to_pandas_dtype())
    return without_nulls(value)


def _classes(dataset: "datasets.Dataset") -> dict[str, tuple[str, ...]]:
    label = import_datasets("HuggingFaceDataset").ClassLabel
    return {
        name: tuple(feature.names)
        for name, feature in dataset.features.items()
        if isinstance(feature, label) and feature.names
    }


def _require_same_classes(folder: Path, splits: "Mapping[Any, datasets.Dataset]") -> None:
    classes = {name: _classes(split) for name, split in splits.items()}
    for label, name, (split, index), (other_split, other_index) in class_clashes(classes):
        raise ConfigError(
            f"{folder}: the class {shortened(repr(name))} of {shortened(repr(label))} has the "
            f"index {index} in the split {split!r}, but {other_index} in {other_split!r}. Save "
            "both with the same ClassLabel (dataset.cast_column)."
        )


class Tfds(_PreparedDataset):
    """A source over a TFDS dataset that was prepared in the array_record format.

    Args:
      path: Folder of one version of the dataset, such as ~/tensorflow_datasets/mnist/3.0.1.
      split: Split in TFDS syntax: "train", "train[:90%]".
      skip: Names of faults (keys of FAULTS). Examples with such a fault are skipped and counted.
      cache_dir: Folder for data derived from the dataset. If None, `.praxis_lite` in the dataset's
        folder.
    """

    needed_package = "tensorflow_datasets"

    @functools.cached_property
    def _builder(self) -> Any:
        tfds = optional_module("tensorflow_datasets", "Tfds")
        try:
            return tfds.builder_from_directory(str(self.folder))
        except Exception as error:  # TFDS raises many kinds of errors for damaged files.
            raise ConfigError(
                f"{self.folder} is not a TFDS dataset: {shortened(str(error), 300)}. Set `path` to "
                "the folder of a version, which contains dataset_info.json."
            ) from None

    @functools.cached_property
    def rows(self) -> Any:
        info = self._builder.info
        known = sorted(info.splits)
        if self._split_name not in known:
            raise ConfigError(
                f"Tfds.split is {self.split!r}, but {self.path} has the splits {known}."
                f"{did_you_mean(str(self.split), known)}"
            )
        if info.file_format.value != "array_record":
            raise ConfigError(
                f"{self.path} has the format {info.file_format.value}, which does not support "
                "random access; expected array_record. Convert it "
                "(tfds build --file_format=array_record, or tfds "
                "convert_format), or use FromDataset."
            )
        self._require_complete_files()
        try:
            return self._builder.as_data_source(self.split)
        except Exception as error:
            raise ConfigError(
                f"Tfds.split is {self.split!r}: {shortened(str(error).split(chr(10))[0], 300)} Use "
                f"a split such as {known[0]!r} or {f'{known[0]}[:90%]'!r}."
            ) from None

    @property
    def _split_name(self) -> str:
        """The name of the split without a range: "train" for "train[:90%]"."""
        return (self.split or "").partition("[")[0]

    def _require_complete_files(self) -> None:
        """Raises ConfigError if a file is missing or truncated, before TFDS opens the files."""
        records = optional_module("array_record.python.array_record_data_source", "Tfds")
        split = self._builder.info.splits[self._split_name]
        for path, expected in zip(split.filepaths, split.shard_lengths, strict=True):
            try:
                actual = f"has {len(records.ArrayRecordDataSource(str(path))):,} records"
            except Exception as error:
                actual = f"cannot be read ({error})"
            if actual != f"has {expected:,} records":
                raise ConfigError(
                    f"{path} {actual}; expected {expected:,} records according to "
                    "dataset_info.json. Copy or prepare the dataset again."
                )

    def example(self, row: Example) -> Example:
        return row

    def classes_of_labels(self) -> dict[str, tuple[str, ...]]:
        label = optional_module("tensorflow_datasets.core.features", "Tfds").ClassLabel
        features = self._builder.info.features
        items = features.items() if hasattr(features, "items") else ()
        return {name: tuple(item.names) for name, item in items if isinstance(item, label)}

    @property
    def version(self) -> str:
        info = self._builder.info
        split = info.splits[self._split_name]
        digest = xxhash.xxh3_64_hexdigest(f"{split.shard_lengths} {split.num_bytes}".encode())
        return f"{info.name}-{info.version}-{digest}"
