"""Figures of decoding: a token's seconds, their lower limit, and the time to the first token.

A compiled decoding step has a prefill, which fills the cache with the prompts, and a loop that
makes a token for each row in an iteration. The plan's seconds are those of an iteration; everything
outside of the loop comes before the first token. An iteration must read all weights and the cache
once, which at the memory's bandwidth is its lower limit.
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
from praxis_tools.explain.hlo_runs import trip_count
from praxis_tools.explain.hlo_text import Program, callees
from praxis_tools.plan.chips import Chip

# The inputs of a language model. What other tasks read for each token is not known here.
_PROMPTS = {"ids", "prefix_lengths", "weights"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """The figures of a decoding step, in addition to its StepPlan, which is of one iteration.

    Attributes:
      batch_size: prompts.
      rows: sequences that get a token in an iteration: prompts x hypotheses.
      prompt_length: padded length of the prompts.
      max_decode_steps: of the decoder.
      first_token_seconds: seconds until the first token (prefill).
      tokens_per_second: of all devices together, while the loop runs.
      weight_bytes: bytes of weights that a device reads in an iteration, without embedding tables.
        This and the fields below are None if the task is not a language model.
      cache_bytes: bytes of the cache on a device, filled or not.
      limit_seconds: weight_bytes and cache_bytes over the memory's bandwidth.
      share_of_limit: `limit_seconds` over the seconds of an iteration.
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
      token_seconds: of an iteration of the loop over tokens.
      first_token_seconds: of everything outside of the loop.
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
    """Returns the body of the loop that ends when all rows have ended, or None.

    It is the largest loop of unknown trip count.
    """
    bodies = [
        callees(instruction, "body")[0] for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while" and trip_count(program, computation, instruction) is None
    ]
    return max(bodies, key=lambda name: len(program.computations[name]), default=None)


def weight_bytes(partitioner: Partitioner) -> int:
    """Returns the bytes of weights that a device reads for a token, as decoding stores them.

    Embedding tables are left out, because only a few of their rows are read.
    """
    tables = set(_embedding_tables(partitioner))
    return sum(
        leaf.bytes_per_device for leaf in partitioner.decode_step.layout.leaves()
        if leaf.path not in tables
    )


def _embedding_tables(partitioner: Partitioner) -> Iterator[str]:
    module = partitioner.task.model.abstract_module()
    for path, layer in nnx.compat.iter_modules(module) if module is not None else ():
        if isinstance(layer, Embedding) and layer.lookup_style == "index":
            yield "/".join(("params", *map(str, path), "emb_var"))


def cache_bytes(partitioner: Partitioner, num_rows: int, length: int) -> int:
    """Returns the bytes per device of a KV cache for `num_rows` rows of `length` tokens.

    The compiler decides how an empty cache is split, within the constraints of the layers.
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
