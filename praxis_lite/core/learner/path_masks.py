"""Masks of weights by their paths: which of them an optimizer decays or regularises."""

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
    """Returns a mask for an optimizer's weight decay: a function from weights to True or False.

        fdl.Partial(optax.adamw, weight_decay=0.1,
                    mask=fdl.Config(path_mask, exclude=(".*/norm",), skip_1d_vectors=True))

    A pattern may match no weight that one optimizer has; see `collected_patterns` for how mistyped
    ones are found.

    Args:
      include: a pattern, or several, matched from the start of a weight's path under params
        (`re.match`); other weights are left out. (): all are in.
      exclude: a pattern, or several, of weights to leave out.
      skip_1d_vectors: leave out scalars and vectors too; the dims of a stack do not count.

    Raises:
      ConfigError: a pattern is not a regular expression.
    """
    setting = "A mask of weights"
    include, exclude = compiled_patterns(setting, include), compiled_patterns(setting, exclude)

    def is_masked_in(path: tuple, weight: Any) -> bool:
        # Keys of dicts alone: a layer of a stack has the name of its stack.
        keys = tuple(key for key in path if isinstance(key, jax.tree_util.DictKey))
        name = path_of(keys)
        if include and not any(pattern.match(name) for pattern in include):
            return False
        if skip_1d_vectors and weight.ndim <= 1:
            return False
        return not any(pattern.match(name) for pattern in exclude)

    def mask(weights: PyTree) -> PyTree:
        collected = _collected.get()
        if collected is not None:
            collected.update(pattern.pattern for pattern in (*include, *exclude))
        return jax.tree.map_with_path(is_masked_in, weights)

    return mask


@contextlib.contextmanager
def collected_patterns() -> Iterator[set[str]]:
    """Yields a set that the patterns of every mask used inside are added to.

    The learner, which knows all weights of a model, traces its optimizers' `init` inside:

        with collected_patterns() as patterns:
            jax.eval_shape(optimizer.init, weights)
    """
    token = _collected.set(patterns := set())
    try:
        yield patterns
    finally:
        _collected.reset(token)


def compiled_patterns(setting: str, patterns: Patterns) -> tuple[re.Pattern, ...]:
    """Returns the regular expressions that a setting names, singly or in a list.

    Raises:
      ConfigError: one is not a regular expression; names the setting.
    """
    is_one = isinstance(patterns, str) or not isinstance(patterns, Sequence)
    patterns = (patterns,) if is_one else tuple(patterns)
    return tuple(path_pattern(setting, pattern) for pattern in patterns)
