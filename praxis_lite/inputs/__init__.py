"""Input pipelines and the text they read; each name below is imported when it is first used.

`TextWindows` is there twice, with the same constructor and the same batches: `tf_data.TextWindows`
prefetches with tf.data, `numpy_data.TextWindows` runs without tensorflow.
"""

import importlib
from typing import Any

_HOMES = {
    "InputPipeline": "base",
    "IndexedPipeline": "base",
    "ByteTokenizer": "tokenizers",
    "TokenIds": "tokenizers",
    "TextCorpus": "text.corpus",
    "InMemory": "numpy_data",
    "SyntheticLm": "numpy_data",
    "Documents": "text.documents",
    "PackedText": "text.packed_text",
    "FromSource": "sources.from_source",
    "JsonLines": "sources.json_lines",
    "ArrowFiles": "sources.columnar",
    "Parquet": "sources.columnar",
    "TfRecords": "sources.records",
    "ArrayRecords": "sources.records",
    "NpyFiles": "sources.arrays",
    "TextFiles": "sources.folders",
    "ImageFiles": "sources.folders",
    "HuggingFaceDataset": "sources.hub",
    "Tfds": "sources.hub",
    "TextPrompts": "text.prompts",
    "PreferenceData": "text.preferences",
    "Mixture": "mixing.mixture",
    "WithWorkers": "workers",
    "FromDataset": "from_dataset",
    "FromGrain": "sources.from_grain",
    "FromGrainIter": "sources.from_grain",
}
_MODULES = ("numpy_data", "tf_data")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
