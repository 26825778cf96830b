"""Masks that select weights by path, for example for weight decay."""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from praxis_lite.core.sharding.leaf_paths import path_of, path_pattern

PyTree = Any
Patterns = str | Sequence[str]

_collected: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "collected_patterns", default=None
)


def path_mask(
    *, include: Patterns = (), exclude: Patterns = (), skip_1d_vectors: bool = False
) -> Callable[[PyTree], PyTree]:
    """Returns a mask function that maps weights to bools, for example for weight decay.

        fdl.Partial(optax.adamw, weight_decay=0.1,
                    mask=fdl.Config(path_mask, exclude=(".*/norm",), skip_1d_vectors=True))

    A pattern need not match a weight in every optimizer. Use `collected_patterns` to find patterns
    that match no weight in the model.

    Args:
      include: One or more patterns, matched from the start of a weight's path under params
        (`re.match`). Only matching weights are included. If empty, all weights are included.
      exclude: One or more patterns of weights to exclude.
      skip_1d_vectors: Whether to exclude scalars and vectors, ignoring stacked dims.

    Raises:
      ConfigError: A pattern is not a valid regular expression.
    """
    setting = "A mask of weights"
    included, excluded = compiled_patterns(setting, include), compiled_patterns(setting, exclude)

    def is_masked_in(path: tuple[Any, ...], weight: Any) -> bool:
        # Use only dict keys, because the layers of a stack share one path.
        keys = tuple(key for key in path if isinstance(key, jax.tree_util.DictKey))
        name = path_of(keys)
        if included and not any(pattern.match(name) for pattern in included):
            return False
        if skip_1d_vectors and weight.ndim <= 1:
            return False
        return not any(pattern.match(name) for pattern in excluded)

    def mask(weights: PyTree) -> PyTree:
        collected = _collected.get()
        if collected is not None:
            collected.update(pattern.pattern for pattern in (*included, *excluded))
        return jax.tree.map_with_path(is_masked_in, weights)

    return mask


@contextlib.contextmanager
def collected_patterns() -> Iterator[set[str]]:
    """Yields a set of the patterns from all masks that are applied in the body.

    The learner traces its optimizers' `init` in the body, and then compares the patterns with the
    paths of all weights:

        with collected_patterns() as patterns:
            jax.eval_shape(optimizer.init, weights)
    """
    patterns: set[str] = set()
    token = _collected.set(patterns)
    try:
        yield patterns
    finally:
        _collected.reset(token)


def compiled_patterns(setting: str, patterns: Patterns) -> tuple[re.Pattern[str], ...]:
    """Compiles one or more regular expressions from a setting.

    Raises:
      ConfigError: A pattern is not a valid regular expression. The message names the setting.
    """
    is_single = isinstance(patterns, str) or not isinstance(patterns, Sequence)
    return tuple(
        path_pattern(setting, pattern) for pattern in ((patterns,) if is_single else patterns)
    )
