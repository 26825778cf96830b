# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.inputs import numpy_data as numpy_data
from praxis_lite.inputs import tf_data as tf_data
from praxis_lite.inputs.base import (
    IndexedPipeline as IndexedPipeline,
)
from praxis_lite.inputs.base import (
    InputPipeline as InputPipeline,
)
from praxis_lite.inputs.from_dataset import FromDataset as FromDataset
from praxis_lite.inputs.mixing.mixture import Mixture as Mixture
from praxis_lite.inputs.numpy_data import InMemory as InMemory
from praxis_lite.inputs.numpy_data import SyntheticLm as SyntheticLm
from praxis_lite.inputs.sources.arrays import NpyFiles as NpyFiles
from praxis_lite.inputs.sources.base import FileSource as FileSource
from praxis_lite.inputs.sources.base import Source as Source
from praxis_lite.inputs.sources.columnar import ArrowFiles as ArrowFiles
from praxis_lite.inputs.sources.columnar import Parquet as Parquet
from praxis_lite.inputs.sources.faults import BadExample as BadExample
from praxis_lite.inputs.sources.folders import ImageFiles as ImageFiles
from praxis_lite.inputs.sources.folders import TextFiles as TextFiles
from praxis_lite.inputs.sources.from_grain import (
    FromGrain as FromGrain,
)
from praxis_lite.inputs.sources.from_grain import (
    FromGrainIter as FromGrainIter,
)
from praxis_lite.inputs.sources.from_source import FromSource as FromSource
from praxis_lite.inputs.sources.hub import HuggingFaceDataset as HuggingFaceDataset
from praxis_lite.inputs.sources.hub import Tfds as Tfds
from praxis_lite.inputs.sources.json_lines import JsonLines as JsonLines
from praxis_lite.inputs.sources.records import ArrayRecords as ArrayRecords
from praxis_lite.inputs.sources.records import TfRecords as TfRecords
from praxis_lite.inputs.text.corpus import TextCorpus as TextCorpus
from praxis_lite.inputs.text.documents import Documents as Documents
from praxis_lite.inputs.text.packed_text import PackedText as PackedText
from praxis_lite.inputs.text.preferences import PreferenceData as PreferenceData
from praxis_lite.inputs.text.prompts import TextPrompts as TextPrompts
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer as ByteTokenizer
from praxis_lite.inputs.tokenizers.plain import TokenIds as TokenIds
from praxis_lite.inputs.workers import WithWorkers as WithWorkers
