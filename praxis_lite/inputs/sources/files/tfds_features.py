"""Guards around TFDS: features.json may name its own classes only; images are decoded safely."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.optional_packages import optional_module, require_package
from praxis_lite.inputs.sources.files.images import image_of, rgb_pixels
from praxis_lite.inputs.sources.files.inside import json_inside

_OWN = "tensorflow_datasets.core.features."


def require_own_features(folder: Path) -> None:
    """Raises ConfigError if features.json names a class other than TFDS's own features.

    TFDS would import the module that is named.
    """
    feature = optional_module("tensorflow_datasets.core.features.feature", "Tfds")
    registered = feature.FeatureConnector._registered_features
    known = {name for name in registered if name.startswith(_OWN)}
    for key, name in _named(json_inside(folder, "features.json")):
        if key == "names_file":
            raise ConfigError(
                f"{folder}/features.json names a file of labels, {shown(repr(name))}; files are "
                "read only where TFDS keeps them. Prepare the dataset again."
            )
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                f"{folder}/features.json names the class {shown(repr(name))}, which is no feature "
                "of TFDS's own; TFDS would import it. Prepare the dataset again with features of "
                "TFDS, or, if you trust it, read its files with ArrayRecords and a decode of yours."
            )


def _named(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields names of classes and files, with their keys, that any version of TFDS would read."""
    if isinstance(node, list):
        for item in node:
            yield from _named(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        is_class = key in ("pythonClassName", "python_class_name")
        # As TFDS wrote them formerly: {"type": ..., "content": ...}.
        is_class |= key == "type" and "content" in node and not isinstance(value, dict)
        if is_class or (key == "names_file" and value is not None):
            yield key, value
        if key in ("json", "content") and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        yield from _named(value)


def decode_images_safely(feature: Any) -> None:
    """Lets a feature of TFDS, and those in it, decode images as other sources do."""
    features = optional_module("tensorflow_datasets.core.features", "Tfds")
    if isinstance(feature, features.Image):
        require_package("PIL", "Tfds, for images,")
        feature.decode_example_np = functools.partial(_pixels, feature, feature.decode_example_np)
    elif isinstance(feature, features.FeaturesDict):
        for item in feature.values():
            decode_images_safely(item)
    elif isinstance(feature, features.Sequence):
        decode_images_safely(feature.feature)
    elif isinstance(feature, features.Audio) and feature._lazy_decode:
        raise ConfigError(
            "The dataset has sounds that TFDS would decode with other programs when they are read. "
            "Prepare it without lazy_decode."
        )


def _pixels(feature: Any, original: Any, data: bytes) -> np.ndarray:
    """Returns an image in the shape and type that the feature says."""
    image = image_of(data)
    channels = feature.shape[-1]
    if feature.np_dtype != np.uint8:  # Stored as PNG, which `image_of` has read.
        return original(data)
    if channels == 3 or image.mode.startswith("I;16"):
        return rgb_pixels(image)[..., :channels]
    expected = {1: "L", 2: "LA", 4: "RGBA"}.get(channels, image.mode)
    pixels = np.asarray(image if image.mode == expected else image.convert(expected))
    return pixels[..., None] if pixels.ndim == 2 else pixels
