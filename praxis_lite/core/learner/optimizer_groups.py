"""Assigns an optimizer to each weight by regex over its path, and decides which are frozen."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence

from praxis_lite.core.errors import ConfigError, did_you_mean, few, require
from praxis_lite.core.learner.optimizer_factories import (
    OptimizerFactory,
    Schedule,
    checked_rate,
)
from praxis_lite.core.learner.path_masks import compiled_patterns


@dataclasses.dataclass(frozen=True)
class AuxiliaryOptimizer:
    """An optimizer and rate for the weights whose paths match a pattern, instead of the main pair.

    Pax's `auxiliary_regex`, `auxiliary_optimizers` and `auxiliary_names`, an entry of each.

    Attributes:
      regex: matched from the start of a weight's path under params (`re.match`), such as
        `softmax/.*/b$`.
      optimizer: called with `learning_rate`, returns the optax transformation.
      learning_rate: a number, or a schedule of the number of updates made.
      name: of its slots and of its learning rate among the metrics.
      clip_gradient_norm_to_value, clip_gradient_single_norm_to_value: limits for the gradients of
        these weights; they need Learner.apply_separate_scaling. See GradientLimits.

    Raises:
      ConfigError: `regex` is not a regular expression, `name` has other characters than letters,
        digits, "_" and "-", or the rate is out of range.
    """

    regex: str
    optimizer: OptimizerFactory
    learning_rate: float | Schedule
    name: str
    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0

    def __post_init__(self):
        require(
            isinstance(self.name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", self.name),
            "AuxiliaryOptimizer.name", self.name, "letters, digits, '_' and '-'",
        )
        compiled_patterns(f"AuxiliaryOptimizer.regex of '{self.name}'", (self.regex,))
        checked_rate("AuxiliaryOptimizer.learning_rate", self.learning_rate)


def check_choices(
    auxiliary: Sequence[AuxiliaryOptimizer], exclusion: Sequence[str], inclusion: Sequence[str]
) -> None:
    """Checks a learner's patterns and names before there are weights; raises ConfigErrors."""
    if exclusion and inclusion:
        raise ConfigError(
            f"Learner.bprop_variable_exclusion is {list(exclusion)} and bprop_variable_inclusion "
            f"is {list(inclusion)}; wanted is one of them. Name the weights to freeze, or the "
            "weights to train."
        )
    compiled_patterns("Learner.bprop_variable_exclusion", exclusion)
    compiled_patterns("Learner.bprop_variable_inclusion", inclusion)
    names = [aux.name for aux in auxiliary]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"Learner.auxiliary_optimizers has two with the name '{name}'. Rename one."
            )


def optimizer_names(
    paths: Collection[str], auxiliary: Iterable[AuxiliaryOptimizer] = (),
    exclusion: Iterable[str] = (), inclusion: Iterable[str] = (),
) -> dict[str, str]:
    """Returns by path the optimizer of each trained weight: the name of an auxiliary one, or "".

    Args:
      paths: of all weights, such as "softmax/w".
      auxiliary: optimizers of the weights that their patterns match; others have the main one.
      exclusion: patterns of the weights that are not trained; each matches whole paths.
      inclusion: such patterns of the weights that are; (): all.

    Raises:
      ConfigError: a pattern matches no weight, nothing is left to train, an auxiliary optimizer
        has frozen weights only, or two have the same weight; names the weights.
    """
    frozen = matched_paths(paths, exclusion, "Learner.bprop_variable_exclusion", whole=True)
    if inclusion:
        setting = "Learner.bprop_variable_inclusion"
        frozen |= set(paths) - matched_paths(paths, inclusion, setting, whole=True)
    if paths and len(frozen) == len(paths):
        raise ConfigError(
            f"Learner.bprop_variable_exclusion is {list(exclusion)}, which freezes all "
            f"{len(paths)} weights, so there is nothing to train. {_paths_there(paths)} Exclude "
            "fewer."
        )
    names = {path: "" for path in paths if path not in frozen}
    for aux in auxiliary:
        setting = f"The regex of the auxiliary optimizer '{aux.name}'"
        result = matched_paths(paths, (aux.regex,), setting)
        if result <= frozen:
            raise ConfigError(
                f"{setting}, {aux.regex!r}, matches frozen weights only: "
                f"{few(sorted(result), 5)}. Remove the optimizer, or train these weights "
                "(bprop_variable_exclusion, bprop_variable_inclusion)."
            )
        for path in sorted(result - frozen):
            if names[path]:
                raise ConfigError(
                    f"The weight {path} is matched by the auxiliary optimizers '{names[path]}' "
                    f"and '{aux.name}', but it can have one only. Change one of their regexes."
                )
            names[path] = aux.name
    return names


def matched_paths(
    paths: Collection[str], patterns: Iterable[str], setting: str, *, whole: bool = False
) -> set[str]:
    """Returns the paths that any of the patterns matches from their start, or as a whole."""
    matched: set[str] = set()
    match = re.fullmatch if whole else re.match
    for pattern in patterns:
        result = {path for path in paths if match(pattern, path)}
        if not result:
            hint = ", which does not begin with params/" if pattern.startswith("params/") else ""
            raise ConfigError(
                f"{setting}: {pattern!r} matches no weight.{did_you_mean(pattern, paths)} "
                f"{_paths_there(paths)} A pattern has to match "
                f"{'the whole of a path' if whole else 'the start of a path'}{hint}."
            )
        matched |= result
    return matched


def _paths_there(paths: Collection[str]) -> str:
    return f"The paths of the model's {len(paths)} weights are {few(list(paths), 5)}."
