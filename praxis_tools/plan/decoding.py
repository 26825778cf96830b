"""Predicts decoding speed: time per token, its lower bound, and time to first token.

A compiled decoding step consists of a prefill that writes the prompts into the cache, and a loop
that generates one token per row in each iteration. The plan reports the time of one iteration, and
counts all work outside of the loop as time to first token. In each iteration, all weights and the
cache are read once; the lower bound is the number of these bytes divided by the memory bandwidth.
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

# Keys of a language model's decode inputs. For other tasks, the bytes read per token are unknown.
_PROMPTS = {"ids", "prefix_lengths", "weights"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Predictions for an entire decoding step, in addition to the predictions for one iteration.

    Attributes:
      batch_size: Number of prompts.
      rows: Number of sequences extended by one token per iteration: prompts x hypotheses.
      prompt_length: Padded length of the prompts, in tokens.
      max_decode_steps: Maximum number of generated tokens per row.
      first_token_seconds: Time to first token (prefill).
      tokens_per_second: Total tokens per second on all devices while the loop runs.
      weight_bytes: Bytes of weights that each device reads per iteration, excluding embedding
        tables. This and the fields below are None if the task is not a language model.
      cache_bytes: Size of the entire cache on each device, including unused entries.
      limit_seconds: `weight_bytes + cache_bytes` divided by the memory bandwidth.
      share_of_limit: `limit_seconds` divided by the time of one iteration.
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


def predict_decoding(
    partitioner: Partitioner,
    element_spec: Mapping[str, Any],
    chip: Chip,
    token_seconds: float,
    first_token_seconds: float,
) -> Decoding:
    """Predicts the speed of a decoding step and the limit set by memory bandwidth.

    Args:
      partitioner: Partitioner of the decoding task.
      element_spec: Shapes and types of a batch of prompts.
      chip: Chip to decode on.
      token_seconds: Time of one iteration of the loop over tokens.
      first_token_seconds: Time of all work outside of the loop.
    """
    task = partitioner.task
    batch_size, prompt_length = element_spec["ids"].shape
    rows = batch_size * task.decoder.num_hyps
    decoding = Decoding(
        batch_size=batch_size,
        rows=rows,
        prompt_length=prompt_length,
        max_decode_steps=task.decoder.max_decode_steps,
        first_token_seconds=first_token_seconds,
        tokens_per_second=rows / token_seconds,
    )
    if set(task.required_decode_inputs) != _PROMPTS:
        return decoding
    weights = weight_bytes(partitioner)
    cache = cache_bytes(partitioner, rows, cache_length(task.decoder, prompt_length))
    limit = (weights + cache) / chip.hbm_bandwidth
    return dataclasses.replace(
        decoding,
        weight_bytes=weights,
        cache_bytes=cache,
        limit_seconds=limit,
        share_of_limit=limit / token_seconds,
    )


def token_loop_body(program: Program) -> str | None:
    """Returns the body of the loop over generated tokens, or None if there is no such loop.

    The loop stops early once all rows are complete, so its trip count is unknown. If the program
    has several loops with unknown trip counts, the largest one is returned.
    """
    bodies = [
        callees(instruction, "body")[0]
        for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while" and trip_count(program, computation, instruction) is None
    ]
    return max(bodies, key=lambda name: len(program.computations[name]), default=None)


def weight_bytes(partitioner: Partitioner) -> int:
    """Returns the bytes of weights that each device reads per token, in their decoding dtypes.

    Embedding tables are excluded, because only a few of their rows are read.
    """
    tables = set(_embedding_tables(partitioner))
    return sum(
        leaf.bytes_per_device
        for leaf in partitioner.decode_step.layout.leaves()
        if leaf.path not in tables
    )


def _embedding_tables(partitioner: Partitioner) -> Iterator[str]:
    module = partitioner.task.model.abstract_module()
    for path, layer in nnx.compat.iter_modules(module) if module is not None else ():
        if isinstance(layer, Embedding) and layer.lookup_style == "index":
            yield "/".join(("params", *map(str, path), "emb_var"))


def cache_bytes(partitioner: Partitioner, num_rows: int, length: int) -> int:
    """Returns the bytes per device of a KV cache for `num_rows` rows of `length` tokens.

    This compiles a program that creates a cache, because the compiler chooses the cache's sharding.
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
