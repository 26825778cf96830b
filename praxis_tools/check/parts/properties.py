"""Finds dependencies between rows, and computes results in two ways that must agree.

For instance, decoding with a cache must produce the same logits as a forward pass over the entire
row, and packed segments must have the same loss as separate rows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.task import Task
from praxis_lite.decode.decoder import Prompts
from praxis_lite.decode.prefill import prefill
from praxis_lite.decode.prompt_padding import check_has_rows
from praxis_lite.decode.sampling import Greedy
from praxis_lite.layers.base.variables import rebuilt
from praxis_tools.check.runs.on_mesh import Batch

MAX_TOKENS = 256  # Maximum number of tokens that are decoded one by one.
STATISTICS = "batch statistics"
EXPECTED = "expected"  # Key of the reference result.


def couplings(task: Task) -> list[str]:
    """Returns the reasons why results for a row depend on other rows, as declared by the task.

    Batch statistics are recognized by `nnx.BatchStat` and Linen's collection "batch_stats".
    """
    couplings = [] if task.couples_rows is None else [task.couples_rows]
    module = task.model.abstract_module()
    if module is not None:
        for _, node in nnx.compat.iter_graph(module):
            coupling = getattr(type(node), "couples_rows", None)
            if isinstance(coupling, str):
                couplings.append(coupling)
            if isinstance(node, nnx.BatchStat):
                couplings.append(STATISTICS)
    specs = jax.tree.leaves_with_path(task.model.weight_specs()["non_trainable"])
    if any("batch_stats" in jax.tree_util.keystr(path) for path, _ in specs):
        couplings.append(STATISTICS)
    return list(dict.fromkeys(couplings))


def token_by_token(task: Task, batch: Batch) -> Callable[..., Any] | None:
    """Returns a function that computes logits both in one forward pass and token by token.

    The function takes (mdl_vars, inputs). Returns None if the model is not a causal language model
    with a cache.
    """
    if not _has_cache(task, batch):
        return None

    def logits(mdl_vars: Any, inputs: Any) -> dict[str, jax.Array]:
        model = task.module(mdl_vars)
        ids = inputs["ids"][:, :MAX_TOKENS]
        num_rows, length = ids.shape

        def step(cache: Any, t: jax.Array) -> tuple[Any, jax.Array]:
            step_logits, cache = rebuilt(model)(
                jax.lax.dynamic_slice_in_dim(ids, t, 1, axis=1),
                positions=jnp.full((num_rows, 1), t, jnp.int32),
                cache=cache,
            )
            return cache, step_logits[:, 0].astype(jnp.float32)

        _, steps = jax.lax.scan(step, model.init_cache(num_rows, length), jnp.arange(length))
        full_logits = rebuilt(model)(ids)[0].astype(jnp.float32)
        return {EXPECTED: full_logits, "token_by_token": jnp.swapaxes(steps, 0, 1)}

    return logits


def ragged_prompts(task: Task, batch: Batch) -> Callable[..., Any] | None:
    """Returns a function that computes logits both in one forward pass and after ragged prompts.

    The function takes (mdl_vars, inputs). It prefills prompts of different lengths in two chunks,
    and continues them token by token. Returns None if the model is not a causal language model with
    a cache.

    Raises:
      ConfigError: The model's cache does not support prompts of different lengths.
    """
    if not _has_cache(task, batch):
        return None
    num_rows, length = batch["ids"].shape
    length = min(length, MAX_TOKENS)
    chunk = length // 3
    if not chunk:
        return None
    check_has_rows(task.model.abstract_module())
    longest, num_steps = 2 * chunk, length - 2 * chunk
    decoder = Greedy(max_decode_steps=num_steps, prefill_chunk_size=chunk)

    def logits(mdl_vars: Any, inputs: Any) -> dict[str, jax.Array]:
        model = task.module(mdl_vars)
        ids, rows = inputs["ids"][:, :length], jnp.arange(num_rows)
        # Lengths from 1 to `longest`, which differ between neighboring rows.
        lengths = 1 + (rows + longest // 2) % longest
        keys = jax.random.split(jax.random.key(0), num_rows)
        prefix = prefill(decoder, model, Prompts(ids[:, :longest], lengths, keys))

        def step(cache: Any, t: jax.Array) -> tuple[Any, jax.Array]:
            positions = lengths + t
            step_logits, cache = rebuilt(model)(
                ids[rows, positions][:, None], positions=positions[:, None], cache=cache
            )
            return cache, step_logits[:, 0].astype(jnp.float32)

        _, steps = jax.lax.scan(step, prefix.cache, jnp.arange(num_steps))
        full_logits = rebuilt(model)(ids)[0].astype(jnp.float32)
        # Positions whose logits both ways compute: the prompt's last token and all tokens after it.
        compared = lengths[:, None] - 1 + jnp.arange(1 + num_steps)[None, :]
        return {
            EXPECTED: full_logits[rows[:, None], compared],
            "ragged": jnp.concatenate([prefix.logits[:, None], jnp.swapaxes(steps, 0, 1)], axis=1),
        }

    return logits


def packed_segments(task: Task, batch: Batch) -> Callable[..., Any] | None:
    """Returns a function that computes the loss for both packed and separate segments.

    The function takes (mdl_vars, inputs). Returns None if the model is not a causal language model,
    or if its `compute_loss` does not take segments.
    """
    model = task.model.abstract_module()
    ids = batch.get("ids")
    settings = set(_parameters(getattr(type(model), "compute_loss", None)))
    if ids is None or ids.ndim != 2 or not {"segment_ids", "positions"} <= settings:
        return None
    if getattr(model, "model_type", "causal") != "causal" or "labels" not in batch:
        return None
    num_rows, length = ids.shape
    half, num_pairs = length // 2, num_rows // 2
    if not half or not num_pairs:
        return None

    def compute_losses(mdl_vars: Any, inputs: Any) -> dict[str, jax.Array]:
        names = ("ids", "labels")
        separate = {name: inputs[name][: 2 * num_pairs, :half] for name in names}
        # Weight each token differently, so that swapped tokens change the loss.
        weights = 1.0 + jnp.cos(jnp.arange(2.0 * num_pairs * half)).reshape(-1, half)
        separate["weights"] = weights.astype(jnp.float32)
        # Row i of `packed` contains the rows i and num_pairs + i of `separate`.
        packed = {
            name: jnp.concatenate([x[:num_pairs], x[num_pairs:]], axis=1)
            for name, x in separate.items()
        }
        segments = jnp.repeat(jnp.array([[1, 2]], jnp.int32), half, axis=1)
        packed["segment_ids"] = jnp.broadcast_to(segments, packed["ids"].shape)
        packed["segment_pos"] = jnp.broadcast_to(
            jnp.tile(jnp.arange(half, dtype=jnp.int32), 2)[None], packed["ids"].shape
        )
        losses = {}
        for name, rows in (("packed", packed), (EXPECTED, separate)):
            metrics, _ = task.outputs(task.compute_loss, task.module(mdl_vars), rows, None)
            losses[name] = metrics["loss"][0]
        return losses

    return compute_losses


def _has_cache(task: Task, batch: Batch) -> bool:
    """Returns whether the model is a causal language model with a cache."""
    model = task.model.abstract_module()
    ids = batch.get("ids")
    if ids is None or ids.ndim != 2 or getattr(model, "model_type", "causal") != "causal":
        return False
    if not {"cache", "positions"} <= set(_parameters(type(model).__call__)):
        return False
    # `init_cache` must require only the numbers of rows and of tokens.
    required = {
        name
        for name, parameter in _parameters(getattr(model, "init_cache", None)).items()
        if parameter.default is inspect.Parameter.empty
    }
    return len(required) == 2


FUNCTIONS = {
    "token by token": token_by_token,
    "ragged prompts": ragged_prompts,
    "packed segments": packed_segments,
}


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    if function is None:
        return {}
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters
