"""The decode loop: one forward pass over ragged prompts, then a token at a time from the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.decode.sampling import Sampling

# B batch, P longest prompt, M most new tokens.


def decode_tokens(
    model: Any,
    ids: jax.Array,
    prefix_lengths: jax.Array,
    key: jax.Array,
    *,
    sampling: Sampling,
    max_decode_steps: int,
    eos_id: int,
) -> dict[str, jax.Array]:
    """Returns the continuation of each prompt.

    Prompts are padded on the right; what the padding left in the cache is overwritten before
    anything attends to it, since a row's new tokens go to the positions right after its prompt.

    Args:
      model: has `init_cache(batch_size, length)` and `(ids, positions=, cache=) -> logits, cache`.
      ids: int32 [B, P].
      prefix_lengths: int32 [B]: true length of each prompt; 0 marks a row to leave empty.
      key: drawn from at each step.
      max_decode_steps: M.
      eos_id: ends a row; it is the last of the row's `output_ids`.

    Returns:
      output_ids int32 [B, M] (0 after the end), decode_lengths int32 [B] (new tokens, end of
      text included), log_probs float32 [B] (sum over the new tokens, of the unfiltered model).
    """
    num_rows, prompt_length = ids.shape
    rows = jnp.arange(num_rows)
    cache = model.init_cache(num_rows, prompt_length + max_decode_steps)
    logits, cache = model(ids, cache=cache)
    last = jnp.maximum(prefix_lengths - 1, 0)
    carry = {
        "step": jnp.zeros((), jnp.int32),
        "logits": logits[rows, last].astype(jnp.float32),
        "cache": cache,
        "done": prefix_lengths == 0,
        "output_ids": jnp.zeros((num_rows, max_decode_steps), jnp.int32),
        "decode_lengths": jnp.zeros((num_rows,), jnp.int32),
        "log_probs": jnp.zeros((num_rows,), jnp.float32),
    }

    def goes_on(carry: dict[str, Any]) -> jax.Array:
        return (carry["step"] < max_decode_steps) & ~jnp.all(carry["done"])

    def step(carry: dict[str, Any]) -> dict[str, Any]:
        t, done = carry["step"], carry["done"]
        new_ids = sampling(carry["logits"], jax.random.fold_in(key, t))
        log_probs = jax.nn.log_softmax(carry["logits"], axis=-1)[rows, new_ids]
        positions = (prefix_lengths + t)[:, None]
        logits, cache = model(new_ids[:, None], positions=positions, cache=carry["cache"])
        return {
            "step": t + 1,
            "logits": logits[:, 0].astype(jnp.float32),
            "cache": cache,
            "done": done | (new_ids == eos_id),
            "output_ids": carry["output_ids"].at[:, t].set(jnp.where(done, 0, new_ids)),
            "decode_lengths": carry["decode_lengths"] + jnp.where(done, 0, 1),
            "log_probs": carry["log_probs"] + jnp.where(done, 0.0, log_probs),
        }

    carry = jax.lax.while_loop(goes_on, step, carry)
    return {name: carry[name] for name in ("output_ids", "decode_lengths", "log_probs")}
