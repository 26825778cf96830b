"""The plan of decoding: a token's seconds against the memory's limit, and those before the first.

A decoding step is compiled whole, as it runs: the prompts' way into the cache, and a loop of which
each turn makes a token for each row. The turn is what is planned; all around the loop comes before
the first token. At best a turn reads all weights and the cache once, at the memory's bandwidth.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from praxis_lite.core.partitioner.compiled_steps import StepOfWeights
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.decode.prefill import cache_length
from praxis_lite.layers.embedding.embeddings import Embedding
from praxis_lite.tools.explain.hlo_runs import trip_count
from praxis_lite.tools.explain.hlo_text import Program, callees
from praxis_lite.tools.plan.chips import Chip

# A language model's prompts. What other tasks read for each token is not known here.
_PROMPTS = {"ids", "prefix_lengths", "weights"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """The figures of a decoding step besides those of its turn, which are the StepPlan's.

    Attributes:
      batch_size, rows: prompts; and sequences that get a token in a turn: prompts x hypotheses.
      prompt_length, max_decode_steps: of the batch, padded, and of the decoder: at most.
      first_token_seconds: from the batch to the first token: the prompts' way into the cache.
      tokens_per_second: of all devices together, while the loop runs.
      weight_bytes, cache_bytes: that a device reads for a token of each row: of weights all but
        tables of which only rows are read; of the cache all places, filled or not. None where the
        task is no language model.
      limit_seconds: both over the memory's bandwidth; None as they are.
      share_of_limit: `limit_seconds` over the seconds of a turn.
    """

    batch_size: int
    rows: int
    prompt_length: int
    max_decode_steps: int
    first_token_seconds: float
    tokens_per_second: float
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    limit_seconds: float | None = None
    share_of_limit: float | None = None


def decoding_of(
    partitioner: Partitioner, element_spec: Mapping[str, Any], chip: Chip,
    token_seconds: float, first_token_seconds: float,
) -> Decoding:
    """Returns the figures of a decoding step on a chip.

    Args:
      element_spec: shapes and types of a batch of prompts.
      token_seconds, first_token_seconds: of a turn of the loop over tokens; of all around it.
    """
    task = partitioner.task
    batch_size, prompt_length = element_spec["ids"].shape
    rows = batch_size * task.decoder.num_hyps
    result = Decoding(
        batch_size=batch_size, rows=rows, prompt_length=prompt_length,
        max_decode_steps=task.decoder.max_decode_steps, first_token_seconds=first_token_seconds,
        tokens_per_second=rows / token_seconds,
    )
    if set(task.required_decode_inputs) != _PROMPTS:
        return result
    weights = weight_bytes(partitioner)
    cache = cache_bytes(partitioner, rows, cache_length(task.decoder, prompt_length))
    limit = (weights + cache) / chip.hbm_bandwidth
    return dataclasses.replace(
        result, weight_bytes=weights, cache_bytes=cache, limit_seconds=limit,
        share_of_limit=limit / token_seconds,
    )


def loop_over_tokens(program: Program) -> str | None:
    """Returns the body of the loop that ends when all rows have, or None if there is no such loop.

    It is the largest of those whose number of turns is not known before they run.
    """
    bodies = [
        callees(one, "body")[0] for around in program.computations.values()
        for one in around.values()
        if one.opcode == "while" and trip_count(program, around, one) is None
    ]
    return max(bodies, key=lambda name: len(program.computations[name]), default=None)


def weight_bytes(partitioner: Partitioner) -> int:
    """Returns the bytes of weights that a device reads for a token, as decoding stores them.

    Of a table that ids are looked up in only rows are read; they count as nothing.
    """
    tables = set(_tables(partitioner))
    return sum(
        leaf.bytes_per_device for leaf in partitioner.decode_step.layout.leaves()
        if leaf.path not in tables
    )


def _tables(partitioner: Partitioner) -> Iterator[str]:
    module = partitioner.task.model.abstract_module()
    for path, layer in nnx.compat.iter_modules(module) if module is not None else ():
        if isinstance(layer, Embedding) and layer.lookup_style == "index":
            yield "/".join(("params", *map(str, path), "emb_var"))


def cache_bytes(partitioner: Partitioner, num_rows: int, length: int) -> int:
    """Returns the bytes of the cache on a device, of so many rows of that length.

    The split of an empty cache is the compiler's to say: layers constrain it, and it fills in.
    """
    step: StepOfWeights = partitioner.decode_step
    empty = partitioner.with_mdl_vars(
        lambda mdl_vars: partitioner.task.module(mdl_vars).init_cache(num_rows, length),
        has_splits=True,
    )
    weights = step.layout.abstract(partitioner.mesh)
    lowered = jax.jit(empty, keep_unused=True).lower(weights)
    shardings = lowered.compile().output_shardings
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x, sharding in zip(
            jax.tree.leaves(lowered.out_info), jax.tree.leaves(shardings), strict=True
        )
    )
