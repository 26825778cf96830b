"""Measures how the CPU time of launches grows with the number of data files.

    python -m benchmarks.growth_files

The files are JSON lines files with a single document each. A launch packs the documents into rows,
computes the fingerprint of the data and reads a batch. The first launch also prepares the data.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.growth import report
from praxis_lite.inputs.mixing.mixture import Mixture
from praxis_lite.inputs.numpy_data import InMemory
from praxis_lite.inputs.sources.json_lines import JsonLines
from praxis_lite.inputs.text.documents import Documents
from praxis_lite.inputs.text.packed_text import PackedText

SIZES = (625, 1_250, 2_500, 5_000)
NUM_SOURCES = (50, 100, 200, 400)


def mixed(num_sources: int) -> None:
    """Checks a mixture, computes its fingerprint, and reads a batch at a high index."""
    rng = np.random.default_rng(num_sources)
    sources = {
        f"source {number}": InMemory({"x": np.arange(7)}, 1, shuffle=True)
        for number in range(num_sources)
    }
    weights = {name: int(rng.integers(1, 1000)) / 1000 for name in sources}
    mixture = Mixture(sources, weights, batch_size=8)
    mixture.fingerprint()
    next(mixture.batches(10**6))


def main() -> None:
    """Prints the growth of first and later launches."""
    with tempfile.TemporaryDirectory() as parent:
        folders = {size: Path(parent, str(size)) for size in SIZES}
        for size, folder in folders.items():
            folder.mkdir()
            for number in range(size):
                Path(folder, f"{number:05}.jsonl").write_text(json.dumps({"text": str(number) * 9}))

        def start(size: int) -> None:
            documents = Documents(JsonLines(f"{folders[size]}/*.jsonl"))
            data = PackedText(documents, "train", batch_size=4, seq_len=128, shuffle=True)
            data.check()
            data.fingerprint()
            next(data.batches())

        def first_start(size: int) -> None:
            shutil.rmtree(folders[size] / ".praxis_lite", ignore_errors=True)
            start(size)

        first_start(SIZES[0])
        is_good = report("a first start by files", SIZES, first_start, repeats=1)
        is_good &= report("a later start by files", SIZES, start, repeats=2)
        is_good &= report("a mixture by sources", NUM_SOURCES, mixed, repeats=2)
        count = sum(len(files) for _, _, files in os.walk(folders[SIZES[-1]] / ".praxis_lite"))
        print(f"{count:,} cached files for {SIZES[-1]:,} files")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
