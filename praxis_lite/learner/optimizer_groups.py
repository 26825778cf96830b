"""Which weights an optimizer gets: chosen by regex over their paths, and one layer at a time.

Stacked weights are updated one layer at a time (`jax.vmap` over the stack), so an optimizer that
looks at whole tensors, such as Adafactor or LAMB, trains a scanned stack as an unrolled one. Pax
does the same with its vectorized variable prefixes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.learner.optimizer_factories import OptimizerFactory, Schedule
from praxis_lite.sharding import WeightSpec

PyTree = Any
Path = tuple[str, ...]
# No loss is learnt at a larger rate: its own scale would have to be below 1e-6.
MAX_LEARNING_RATE = 1e6


@dataclasses.dataclass(frozen=True)
class AuxiliaryOptimizer:
    """An optimizer and rate for the weights whose paths match a pattern, in place of the main ones.

    Pax's `auxiliary_regex`, `auxiliary_optimizers` and `auxiliary_names`, an entry of each.

    Attributes:
      regex: matched from the start of a weight's path under params (`re.match`), such as
        `softmax/.*/b$`.
      optimizer: called with `learning_rate`, returns the optax transformation.
      learning_rate: a number, or a schedule of the number of updates made.
      name: of its slots and of its learning rate among the metrics.
      clip_gradient_norm_to_value, clip_gradient_single_norm_to_value: limits of its own weights'
        gradients, which Learner.apply_separate_scaling heeds; see GradientLimits.

    Raises:
      ConfigError: `regex` is no regular expression, or `name` has other characters than letters,
        digits, "_" and "-"; or as `checked_rate`.
    """

    regex: str
    optimizer: OptimizerFactory
    learning_rate: float | Schedule
    name: str
    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0

    def __post_init__(self):
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ConfigError(
                f"AuxiliaryOptimizer.name is {self.name!r}; wanted are letters, digits, '_', '-'."
            )
        _check_patterns((self.regex,), f"AuxiliaryOptimizer.regex of '{self.name}'")
        checked_rate("AuxiliaryOptimizer.learning_rate", self.learning_rate)


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that one optimizer updates together.

    Attributes:
      optimizer: of one layer's weights.
      stack_shape: the leading dims of each weight, which count layers; () for single weights.
      weights: nested dict of just these weights' leaves.
      optimizer_name: an auxiliary optimizer's, or "".
    """

    optimizer: optax.GradientTransformation
    stack_shape: tuple[int, ...]
    weights: dict[str, Any]
    optimizer_name: str = ""

    def per_layer(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns `fn`, of one layer's trees, mapped over the stacked dims of all its arguments."""
        for _ in self.stack_shape:
            fn = jax.vmap(fn)
        return fn


def checked_rate(setting: str, learning_rate: float | Schedule) -> float | Schedule:
    """Returns the rate; what a schedule gives is seen step by step.

    Raises:
      ConfigError: it is a number that is not finite, or above MAX_LEARNING_RATE; names `setting`.
    """
    # `not <=`, for a NaN compares as neither.
    if isinstance(learning_rate, int | float) and not abs(learning_rate) <= MAX_LEARNING_RATE:
        raise ConfigError(
            f"{setting} is {learning_rate!r:.80}; wanted is a number of at most "
            f"{MAX_LEARNING_RATE:g}, such as 1e-3. A model learns nothing at this one."
        )
    return learning_rate


def rate_at(learning_rate: float | Schedule, num_updates: jax.Array) -> jax.Array:
    """Returns the float32 learning rate of the update after `num_updates`."""
    rate = learning_rate(num_updates) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def check_choices(
    auxiliary: Sequence[AuxiliaryOptimizer], exclusion: Sequence[str], inclusion: Sequence[str]
) -> None:
    """Checks what can be checked of a learner's patterns before there are weights.

    Raises:
      ConfigError: both exclusion and inclusion are given, a pattern is no regular expression, or
        two optimizers have the same name.
    """
    if exclusion and inclusion:
        raise ConfigError(
            "Learner.bprop_variable_exclusion and bprop_variable_inclusion are both set; wanted "
            "is one: the weights to freeze, or the weights to train. Remove the other."
        )
    _check_patterns(exclusion, "Learner.bprop_variable_exclusion")
    _check_patterns(inclusion, "Learner.bprop_variable_inclusion")
    names = [aux.name for aux in auxiliary]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"Learner.auxiliary_optimizers has two with the name '{name}'; wanted is a name "
                "of its own for each. Rename one."
            )


def _check_patterns(patterns: Iterable[str], setting: str) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{setting}: {pattern!r} is no regular expression: {error}. Mend the pattern."
            ) from error


def optimizer_names(
    weight_specs: PyTree,
    auxiliary: Iterable[AuxiliaryOptimizer] = (),
    exclusion: Iterable[str] = (),
    inclusion: Iterable[str] = (),
) -> dict[Path, str]:
    """Returns the optimizer of each weight that is trained: an auxiliary one's name, or "".

    Args:
      weight_specs: nested dict of WeightSpec.
      auxiliary: whose patterns choose weights; the others have the main optimizer.
      exclusion: patterns of the weights that are not trained; each matches whole paths.
      inclusion: patterns of the weights that are; none: all.

    Raises:
      ConfigError: a pattern matches no weight, nothing is left to train, an auxiliary optimizer
        has frozen weights only, or two have the same weight; names the weights.
    """
    paths = {"/".join(path): path for path, _ in spec_items(weight_specs)}
    frozen = _matched(paths, exclusion, "Learner.bprop_variable_exclusion", whole=True)
    if inclusion:
        setting = "Learner.bprop_variable_inclusion"
        frozen |= paths.keys() - _matched(paths, inclusion, setting, whole=True)
    if paths and len(frozen) == len(paths):
        raise ConfigError(
            f"Learner.bprop_variable_exclusion freezes all {len(paths)} weights, so there is "
            f"nothing to train. {_paths_there(paths)} Exclude fewer."
        )
    names = {name: "" for name in paths if name not in frozen}
    for aux in auxiliary:
        setting = f"The regex of the auxiliary optimizer '{aux.name}'"
        found = _matched(paths, (aux.regex,), setting)
        if found <= frozen:
            raise ConfigError(
                f"{setting}, {aux.regex!r}, matches frozen weights only: {_some(sorted(found))}. "
                "Remove the optimizer, or train these weights (bprop_variable_exclusion, "
                "bprop_variable_inclusion)."
            )
        for name in sorted(found - frozen):
            if names[name]:
                raise ConfigError(
                    f"The weight {name} is matched by the auxiliary optimizers '{names[name]}' "
                    f"and '{aux.name}'; wanted is one optimizer for each weight. Change one of "
                    "their regexes."
                )
            names[name] = aux.name
    return {paths[name]: optimizer for name, optimizer in names.items()}


def report_lines(weight_specs: PyTree, names: Mapping[Path, str]) -> list[str]:
    """Returns a line for each optimizer and for what is frozen; [] where one has all weights.

    Args:
      names: of `optimizer_names`.
    """
    members: dict[str, list[tuple[str, int]]] = {}
    for path, spec in spec_items(weight_specs):
        name = names.get(path)
        label = "frozen" if name is None else f"optimizer '{name}'" if name else "main optimizer"
        members.setdefault(label, []).append(("/".join(path), math.prod(spec.shape)))
    if members.keys() <= {"main optimizer"}:
        return []
    return [
        f"{label}: {len(weights)} {'weight' if len(weights) == 1 else 'weights'}, "
        f"{sum(size for _, size in weights):,} parameters: {_some([path for path, _ in weights])}"
        for label, weights in members.items()
    ]


def check_mask_patterns(weight_specs: PyTree, patterns: Iterable[str]) -> None:
    """Checks that the patterns of optimizers' masks match something.

    Raises:
      ConfigError: one matches no weight of the whole model.
    """
    names = ["/".join(path) for path, _ in spec_items(weight_specs)]
    _matched(names, sorted(patterns), "A mask of an optimizer of the Learner")


def _matched(
    names: Collection[str], patterns: Iterable[str], setting: str, *, whole: bool = False
) -> set[str]:
    """Returns the names that one of the patterns matches from their start, or as a whole."""
    matched: set[str] = set()
    match = re.fullmatch if whole else re.match
    for pattern in patterns:
        found = {name for name in names if match(pattern, name)}
        if not found:
            hint = ", which does not begin with params/" if pattern.startswith("params/") else ""
            raise ConfigError(
                f"{setting}: {pattern!r} matches no weight.{did_you_mean(pattern, names)} "
                f"{_paths_there(names)} A pattern has to match "
                f"{'the whole of a path' if whole else 'the start of a path'}{hint}."
            )
        matched |= found
    return matched


def _paths_there(names: Collection[str]) -> str:
    return f"The paths of the model's {len(names)} weights are {_some(list(names))}."


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def select(tree: PyTree, paths: Iterable[Path]) -> dict[str, Any]:
    """Returns the nested dict of just the leaves of `tree` at `paths`."""
    selected: dict[str, Any] = {}
    for path in paths:
        leaf, target = tree, selected
        for part in path[:-1]:
            leaf, target = leaf[part], target.setdefault(part, {})
        target[path[-1]] = leaf[path[-1]]
    return selected


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dict that holds the leaves of both."""
    both = dict(a)
    for name, value in b.items():
        both[name] = merged(both[name], value) if name in both else value
    return both


def grouped(
    tree: PyTree,
    weight_specs: PyTree,
    names: Mapping[Path, str],
    optimizers: Mapping[str, optax.GradientTransformation],
    *,
    by_stack: bool = True,
) -> dict[str, Group]:
    """Returns the weights in `names` by their optimizer and the shape of their stack.

    Args:
      tree: of the params' structure; leaves that are not in `names` may lack.
      names: of `optimizer_names`.
      optimizers: by these names.
      by_stack: False: a stack is one array, and belongs to "unstacked".

    Returns:
      Weights without a stacked dim are "unstacked", those of a scanned stack of 7 "stack_7"; an
      auxiliary optimizer's are "NAME.unstacked", "NAME.stack_7".
    """
    paths: dict[tuple[str, tuple[int, ...]], list[Path]] = {}
    for path, spec in spec_items(weight_specs):
        if path in names:
            stack_shape = spec.stack_shape if by_stack else ()
            paths.setdefault((names[path], stack_shape), []).append(path)
    groups = {}
    for (name, stack_shape), members in paths.items():
        stack = "stack_" + "x".join(map(str, stack_shape)) if stack_shape else "unstacked"
        group = Group(optimizers[name], stack_shape, select(tree, members), name)
        groups[f"{name}.{stack}" if name else stack] = group
    return groups


def spec_items(weight_specs: PyTree, prefix: Path = ()) -> Iterator[tuple[Path, WeightSpec]]:
    """Yields (path, spec) of every weight."""
    for name, child in weight_specs.items():
        if isinstance(child, WeightSpec):
            yield (*prefix, name), child
        else:
            yield from spec_items(child, (*prefix, name))
