"""A residual branch `x + f(x)`, with norms where a policy has them, and the keys of its parts."""

from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.errors import ConfigError, did_you_mean

# Where the norm of a residual branch `x + f(x)` is: f(norm(x)); norm(f(x)); norm(f(norm(x))), two
# norms; norm(x + f(x)).
NORM_POLICIES = ("pre", "post", "primer_hybrid", "post_skip")


def check_norm_policy(norm_policy: str, layer: object) -> None:
    """Checks the name of a policy.

    Raises:
      ConfigError: there is none of that name; names the layer's class and the nearest.
    """
    if norm_policy not in NORM_POLICIES:
        raise ConfigError(
            f"{type(layer).__name__}.norm_policy is {norm_policy!r}; wanted is one of "
            f"{NORM_POLICIES}.{did_you_mean(str(norm_policy), NORM_POLICIES)}"
        )


def normed_branch(
    norm_policy: str,
    norms: tuple[Any, Any, Any],
    inputs: jax.Array,
    branch: Callable[[jax.Array], jax.Array],
    join: Callable[[jax.Array, jax.Array], jax.Array],
    key: jax.Array | None,
) -> jax.Array:
    """Returns `join(inputs, branch(inputs))` with norms where the policy has them.

    Args:
      norms: the only one, or that before and that after of primer_hybrid.
      key: tells a norm with batch statistics that this is a training pass.
    """
    norm, norm_before, norm_after = norms
    before = {"pre": norm, "primer_hybrid": norm_before}.get(norm_policy)
    after = {"post": norm, "primer_hybrid": norm_after}.get(norm_policy)
    outputs = branch(inputs if before is None else before(inputs, key=key))
    outputs = join(inputs, outputs if after is None else after(outputs, key=key))
    return norm(outputs, key=key) if norm_policy == "post_skip" else outputs


def split_keys(key: jax.Array | None, num: int) -> Any:
    """Returns `num` keys of a training pass; None each where it is none."""
    return (None,) * num if key is None else jax.random.split(key, num)
