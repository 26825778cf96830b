"""A dataset that Hugging Face's library saved: the Arrow files of a folder, and images in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from praxis_lite.core.errors import ConfigError, did_you_mean, shown
from praxis_lite.host.optional_packages import require_package
from praxis_lite.inputs.mixing.same_classes import class_clashes
from praxis_lite.inputs.sources.columnar import Batches, mapped, row_of, validate
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.images import image_of
from praxis_lite.inputs.sources.files.inside import file_inside, json_inside

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def saved_dataset(folder: Path, split: str | None) -> "SavedDataset":
    """Returns the dataset of a folder, or of a split of it.

    Raises:
      ConfigError: there is none; its files lead out of the folder, or are damaged; or the classes
        of its splits are not the same.
    """
    if (folder / _STATE).exists() or not (folder / _SPLITS).exists():
        if not folder.is_dir() or not (folder / _STATE).exists():
            raise ConfigError(
                f"{folder} holds no dataset of Hugging Face's, which has a {_STATE}. Write one "
                "with dataset.save_to_disk(path); one from their hub is loaded by load_dataset "
                "first."
            )
        if split is not None:
            raise ConfigError(
                f"HuggingFaceDataset.split is {split!r}, but {folder} holds a dataset without "
                "splits. Leave split out."
            )
        return SavedDataset(folder)
    splits = json_inside(folder, _SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(element, str) for element in splits):
        raise ConfigError(
            f"{folder / _SPLITS} has {shown(repr(splits))} as splits; wanted is a list of names. "
            "Save the dataset again."
        )
    if split not in splits:
        raise ConfigError(
            f"HuggingFaceDataset.split is {split!r}; {folder} has "
            f"{shown(repr(sorted(splits)), 300)}.{did_you_mean(str(split), splits)}"
        )
    for item in splits:
        file_inside(folder, f"{item}/{_STATE}", _SPLITS)
    classes = {one: _classes(_features_of(folder / one)) for one in splits}
    for label, name, (item, number), (other, expected) in class_clashes(classes):
        raise ConfigError(
            f"{folder}: {shown(repr(label))} counts the class {shown(repr(name))} as {number} in "
            f"the split {item!r}, and as {expected} in {other!r}. Save both with the same "
            "ClassLabel (dataset.cast_column)."
        )
    return SavedDataset(folder / split)


class SavedDataset:
    """The rows of a folder with state.json, dataset_info.json and Arrow files.

    Raises:
      ConfigError: a file is not in the folder, or is damaged.
    """

    def __init__(self, folder: Path):
        state, self._features = json_inside(folder, _STATE), _features_of(folder)
        fingerprint, files = state.get("_fingerprint"), state.get("_data_files")
        if not isinstance(fingerprint, str) or not isinstance(files, list):
            raise ConfigError(
                f"{folder / _STATE} lacks the text _fingerprint or the list _data_files. Save the "
                "dataset again."
            )
        self.fingerprint = _opened_fingerprint(fingerprint)
        names = [file.get("filename") if isinstance(file, dict) else file for file in files]
        self._paths = [file_inside(folder, name, str(folder / _STATE)) for name in names]
        self._files: list[Batches] = [mapped(path) for path in self._paths]
        self._is_valid = [np.zeros(len(item.batches), bool) for item in self._files]
        counts = [int(element.stops[-1]) if element.batches else 0 for element in self._files]
        self._stops = np.cumsum(counts, dtype=np.int64)
        self.num_rows = sum(counts)
        self.classes = _classes(self._features)
        if _has_image(self._features):
            require_package("PIL", f"{folder}, for its images,")
        self._names = _columns(self._files, state.get("_format_columns"), folder)

    def row(self, number: int, where: str) -> dict[str, Any]:
        """Returns a row. Raises BadExample, which says `where`."""
        file = int(np.searchsorted(self._stops, number, side="right"))
        batches = self._files[file]
        batch, within = batches.place_of(number - (int(self._stops[file - 1]) if file else 0))
        if not self._is_valid[file][batch]:
            validate(batches.batches[batch], self._paths[file])
            self._is_valid[file][batch] = True
        result = row_of(batches.batches[batch], within, self._names, self._paths[file], number)
        return {
            name: _decoded(self._features.get(name), value, where) for name, value in result.items()
        }


def _opened_fingerprint(saved: str) -> str:
    """Returns the fingerprint that Hugging Face's library gives a dataset when it has opened it.

    Checkpoints have it. It hashes pickled texts, and an empty dict, as its `Hasher` does.
    """
    digest = xxhash.xxh64()
    for text in (saved, "datasets.arrow_dataset.Dataset.set_format", "format_kwargs"):
        encoded = text.encode(errors="replace")[:255]
        pickled = b"\x8c" + bytes([len(encoded)]) + encoded + b"."
        pickled = b"\x80\x04\x95" + len(pickled).to_bytes(8, "little") + pickled
        digest.update(b"==<class 'str'>==" + xxhash.xxh64_hexdigest(pickled).encode())
    digest.update(b"==<class 'dict'>==" + xxhash.xxh64_hexdigest(b"\x80\x04}\x94.").encode())
    return digest.hexdigest()


def _columns(files: list[Batches], chosen: Any, folder: Path) -> list[str]:
    """Returns the columns of a row: those of the files, or those of them that were chosen."""
    names = [file.batches[0].schema.names for file in files if file.batches]
    if any(item != names[0] or len(set(item)) < len(item) for item in names):
        raise ConfigError(
            f"{folder}: its files have the columns {shown(repr(names), 300)}; wanted are the same "
            "in each, and each name once. Save the dataset again."
        )
    known = names[0] if names else []
    if not isinstance(chosen, list):
        return known
    return [name for name in known if name in chosen]


def _features_of(folder: Path) -> Mapping[str, Any]:
    """Returns the types of columns, as Hugging Face's library describes them; {} if it does not."""
    result = json_inside(folder, _INFO).get("features")
    return result if isinstance(result, dict) else {}


def _classes(feature: Any, path: str = "") -> dict[str, tuple[str, ...]]:
    """Returns the names of the classes of each label, by the path of its column."""
    if isinstance(feature, list):
        return _classes(feature[0], path) if feature else {}
    if not isinstance(feature, dict):
        return {}
    if feature.get("_type") == "ClassLabel":
        names = feature.get("names")
        return {path: tuple(map(str, names))} if isinstance(names, list) else {}
    result = {}
    for name, item in feature.items():
        result |= _classes(item, path if name == "feature" else f"{path}.{name}".lstrip("."))
    return result


def _has_image(feature: Any) -> bool:
    if isinstance(feature, list):
        return any(map(_has_image, feature))
    if not isinstance(feature, dict):
        return False
    return _is_image(feature) or any(_has_image(item) for item in feature.values())


def _is_image(feature: dict[str, Any]) -> bool:
    return feature.get("_type") == "Image" and feature.get("decode") is not False


def _decoded(feature: Any, value: Any, where: str) -> Any:
    """Returns a value with its images decoded."""
    if value is None or not _has_image(feature):
        return value
    if isinstance(feature, list):
        return [_decoded(feature[0], item, where) for item in value]
    if _is_image(feature):
        return _image(feature, value, where)
    inner = feature
    if isinstance(feature.get("_type"), str):  # List, LargeList, Sequence.
        inner = feature.get("feature")
        if isinstance(value, list):
            return [_decoded(inner, element, where) for element in value]
        if isinstance(value, dict) and isinstance(inner, dict):  # A Sequence of dicts is columns.
            return {k: [_decoded(inner.get(k), x, where) for x in v] for k, v in value.items()}
    if isinstance(value, dict):
        return {name: _decoded(inner.get(name), one, where) for name, one in value.items()}
    return value


def _image(feature: dict[str, Any], value: Any, where: str) -> Any:
    data, path = value, None
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
    elif isinstance(value, str):
        data, path = None, value
    if not isinstance(data, bytes):
        raise BadExample(
            "damaged", f"{where},",
            f"has the path of an image, {shown(repr(path))}, and not its bytes; no file is read "
            "that a row names", "Save the dataset with its images, as save_to_disk does.",
        )
    try:
        image = image_of(data)
        mode = feature.get("mode")
        return image.convert(mode) if isinstance(mode, str) and mode != image.mode else image
    except ValueError as error:
        raise BadExample(
            "damaged", f"{where},", f"has an image that cannot be read: {shown(str(error), 300)}",
            "Make or copy it again.",
        ) from None
