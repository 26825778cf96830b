"""Measures the time that speculation and prefix caching save, with the model of `decoding.py`.

`python -m benchmarks.decoding_savings` alternates between decoding with and without each feature.
For speculation (`num_speculative_tokens`), it generates 129 tokens for prompts that repeat eight
tokens. For prefix caching (`num_cached_prefixes`), it measures the time to the first token for
prompts of 512 tokens of which only 64 differ.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.decoding import (
    DIMS,
    NUM_LAYERS,
    NUM_PROMPT,
    REPEATS,
    VOCAB,
    Setup,
    Worker,
    write_llama,
)

NUM_NEW, NUM_LONG, NUM_OWN = 129, 512, 64


def measure_drafts(worker: Worker, batch: int, num_drafts: int) -> None:
    """Prints the times for repetitive prompts, without and with speculation."""
    rng = np.random.default_rng(batch)
    prompts = np.tile(rng.integers(3, VOCAB, (batch, NUM_PROMPT // 4)), (1, 4)).tolist()
    rate, tokens = {0: 0.0, num_drafts: 0.0}, {}
    for turn in range(1 + REPEATS):
        for num in rate:
            first = worker.generate(prompts, 1, num_speculative_tokens=num)[0]
            seconds, tokens[num] = worker.generate(prompts, NUM_NEW, num_speculative_tokens=num)
            if turn:  # The first turn compiles.
                rate[num] = max(rate[num], batch * (NUM_NEW - 1) / (seconds - first))
    print(
        f"batch {batch:<4}{rate[0]:>9.1f} tokens/s, with {num_drafts} drafts "
        f"{rate[num_drafts]:.1f}: ratio {rate[num_drafts] / rate[0]:.2f}, the same tokens: "
        f"{tokens[0] == tokens[num_drafts]}",
        flush=True,
    )


def measure_shared(worker: Worker, batch: int) -> None:
    """Prints the times for prompts with a common prefix, without and with prefix caching."""
    prompts = np.random.default_rng(batch).integers(3, VOCAB, (batch, NUM_LONG))
    num_same = NUM_LONG - NUM_OWN
    prompts[:, :num_same] = prompts[0, :num_same]
    seconds, tokens = {0: 1e9, 1: 1e9}, {}
    for _ in range(1 + REPEATS):
        for num in seconds:
            first, tokens[num] = worker.generate(prompts.tolist(), 1, num_cached_prefixes=num)
            seconds[num] = min(seconds[num], first)
    print(
        f"batch {batch:<4}{NUM_LONG * batch} tokens of prompts: first token after "
        f"{seconds[0]:.3f} s; {num_same + NUM_OWN * batch} read: {seconds[1]:.3f} s, ratio "
        f"{seconds[0] / seconds[1]:.2f}, the same tokens: {tokens[0] == tokens[1]}",
        flush=True,
    )


def main() -> None:
    """Prints the results for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num_speculative_tokens", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup("float32", None, (1, 1), DIMS, NUM_LAYERS)
        write_llama(Path(folder), setup)
        worker = Worker(sys.executable, "ours", folder, setup, args.threads)
        for batch in args.batches:
            measure_drafts(worker, batch, args.num_speculative_tokens)
            if batch > 1:
                measure_shared(worker, batch)
        worker.end()


if __name__ == "__main__":
    main()
