"""Datasets that another library has prepared on disk: TFDS, Hugging Face."""

import abc
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.inputs.sources.base import EXAMPLES_PER_PART, Example, Part, Source
from praxis_lite.inputs.sources.record_files import RecordFile


@dataclasses.dataclass(eq=False)
class _Prepared(Source):
    """A dataset that finds an example by its number itself."""

    path: str
    split: str | None = None
    _: dataclasses.KW_ONLY
    skip: tuple[str, ...] = ()
    cache_dir: str | None = None

    @functools.cached_property
    @abc.abstractmethod
    def dataset(self) -> Any:
        """What the library opens."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """What is another where the examples are."""

    def check(self) -> None:
        super().check()
        if not len(self):
            raise ConfigError(f"{self.location} has no examples. Leave the source out.")

    @property
    def location(self) -> str:
        return f"{self.path}, {self.split}" if self.split else self.path

    def __len__(self) -> int:
        return len(self.dataset)

    def where(self, index: int) -> str:
        return f"{self.location}, row {index}"

    def parts(self) -> list[Part]:
        return [
            Part(start, min(start + EXAMPLES_PER_PART, len(self)),
                 f"{self.split or 'all'}.{self.version}.{start}".replace("/", "_"))
            for start in range(0, len(self), EXAMPLES_PER_PART)
        ]

    def cache_folder(self) -> str:
        return str(Path(self.cache_dir or Path(self.path) / ".praxis_lite").expanduser())

    def fingerprint(self) -> dict[str, Any]:
        return {
            "source": type(self).__name__, "skip": sorted(self.skip), "split": self.split,
            "version": self.version, "examples": len(self),
        }

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens it anew.
        names = {one.name for one in dataclasses.fields(self)}
        return {name: value for name, value in vars(self).items() if name in names}


class HuggingFaceDataset(_Prepared):
    """The rows of a dataset that `datasets` wrote with `save_to_disk`; lists become arrays.

    Args:
      path: the folder.
      split: of a DatasetDict; None: the folder holds one dataset.
      skip: names of FAULTS: examples with one are left out and counted.
      cache_dir: where what is derived is kept. None: `.praxis_lite` in the folder.
    """

    @functools.cached_property
    def dataset(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise _not_installed("datasets", "HuggingFaceDataset", error) from None
        folder = Path(self.path).expanduser()
        try:
            found = datasets.load_from_disk(str(folder))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder} holds no dataset of Hugging Face's: {error}. Write one with "
                "dataset.save_to_disk(path); one from their hub is loaded by load_dataset first."
            ) from None
        splits = sorted(found) if isinstance(found, dict) else []
        if splits and self.split not in splits:
            raise ConfigError(
                f"HuggingFaceDataset.split is {self.split!r}; {folder} has {splits}."
                f"{did_you_mean(str(self.split), splits)}"
            )
        if not splits and self.split is not None:
            raise ConfigError(
                f"HuggingFaceDataset.split is {self.split!r}, but {folder} holds a dataset without "
                "splits. Leave split out."
            )
        return found[self.split] if splits else found

    @property
    def version(self) -> str:
        return self.dataset._fingerprint

    def __getitem__(self, index: int) -> Example:
        found = self.dataset[int(index)]
        # By their type, not by what is there: an empty list is an array, too.
        return {
            name: np.array(one, self._lists_of_numbers[name])
            if name in self._lists_of_numbers and isinstance(one, list) and None not in one
            else one
            for name, one in found.items()
        }

    @functools.cached_property
    def _lists_of_numbers(self) -> dict[str, str]:
        """The dtype of each column that has lists of numbers."""
        inner = {
            name: getattr(getattr(one, "feature", None), "dtype", None)
            for name, one in self.dataset.features.items()
        }
        return {
            name: dtype for name, dtype in inner.items()
            if isinstance(dtype, str) and re.fullmatch(r"u?int\d+|float\d+|bool", dtype)
        }


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
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise _not_installed("tensorflow-datasets", "Tfds", error) from None
        folder = Path(self.path).expanduser()
        try:
            return tfds.builder_from_directory(str(folder))
        except (OSError, ValueError, tfds.core.registered.DatasetNotFoundError) as error:
            raise ConfigError(
                f"{folder} holds no dataset of TFDS: {error}. Name the folder of a version, with "
                "its dataset_info.json."
            ) from None

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
        try:
            return self._builder.as_data_source(self.split)
        except ValueError as error:
            raise ConfigError(
                f"Tfds.split is {self.split!r}: {str(error).splitlines()[0]} Write "
                f"{known[0]!r} or {f'{known[0]}[:90%]'!r}, say."
            ) from None

    def check(self) -> None:
        super().check()
        # TFDS itself would read zeros out of a file that is cut off.
        split = self._builder.info.splits[self.split.partition("[")[0]]
        for path, wanted in zip(split.filepaths, split.shard_lengths, strict=True):
            try:
                found = len(RecordFile(str(path)))
            except RuntimeError as error:
                found = f"cannot be read ({error})"
            if found != wanted:
                raise ConfigError(
                    f"{path} {found if isinstance(found, str) else f'has {found:,} records'}; "
                    f"wanted are {wanted:,} records, as its dataset_info.json says. Copy or "
                    "prepare the dataset again."
                )

    @property
    def version(self) -> str:
        info = self._builder.info
        split = info.splits[self.split.partition("[")[0]]
        digest = xxhash.xxh3_64_hexdigest(f"{split.shard_lengths} {split.num_bytes}".encode())
        return f"{info.name}-{info.version}-{digest}"

    def __getitem__(self, index: int) -> Example:
        return self.dataset[int(index)]


def _not_installed(package: str, wanted_by: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{wanted_by} reads with {package}, which is not installed ({error}). Install it: pip "
        f"install 'praxis_lite[data]' (or: pip install {package})."
    )
