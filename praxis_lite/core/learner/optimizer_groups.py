"""Assigns optimizers to weights, or freezes weights, using patterns that match weight paths."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence

from praxis_lite.core.errors import ConfigError, did_you_mean, first_few, require
from praxis_lite.core.learner.optimizer_factories import (
    OptimizerFactory,
    Schedule,
    checked_rate,
)
from praxis_lite.core.learner.path_masks import compiled_patterns


@dataclasses.dataclass(frozen=True)
class AuxiliaryOptimizer:
    """An optimizer and learning rate for weights whose paths match a regex.

    Corresponds to one entry in each of Pax's `auxiliary_regex`, `auxiliary_optimizers` and
    `auxiliary_names`.

    Attributes:
      regex: Regular expression, matched from the start of a weight's path under params
        (`re.match`), such as `softmax/.*/b$`.
      optimizer: Takes `learning_rate` and returns an optax transformation.
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      name: Name of the optimizer in the paths of its slots and in its learning rate metric.
      clip_gradient_norm_to_value: Limit for the gradients of these weights; see `GradientLimits`.
        Requires `Learner.apply_separate_scaling`.
      clip_gradient_single_norm_to_value: Limit for the gradient of each of these weights. Requires
        `Learner.apply_separate_scaling`.

    Raises:
      ConfigError: `regex` is not a valid regular expression, `name` contains characters other than
        letters, digits, "_" and "-", or the learning rate is out of range.
    """

    regex: str
    optimizer: OptimizerFactory
    learning_rate: float | Schedule
    name: str
    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", self.name) is not None,
            "AuxiliaryOptimizer.name",
            self.name,
            "letters, digits, '_' and '-'",
        )
        compiled_patterns(f"AuxiliaryOptimizer.regex of '{self.name}'", (self.regex,))
        checked_rate("AuxiliaryOptimizer.learning_rate", self.learning_rate)


def check_choices(
    auxiliary: Sequence[AuxiliaryOptimizer], exclusion: Sequence[str], inclusion: Sequence[str]
) -> None:
    """Checks the patterns and optimizer names of a learner before the weights are known."""
    if exclusion and inclusion:
        raise ConfigError(
            f"Learner.bprop_variable_exclusion {list(exclusion)} cannot be combined with "
            f"bprop_variable_inclusion {list(inclusion)}. List either the weights to freeze or the "
            "weights to train."
        )
    compiled_patterns("Learner.bprop_variable_exclusion", exclusion)
    compiled_patterns("Learner.bprop_variable_inclusion", inclusion)
    names = [aux.name for aux in auxiliary]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"Learner.auxiliary_optimizers contains two optimizers with the name '{name}'. "
                "Rename one of them."
            )


def optimizer_names(
    paths: Collection[str],
    auxiliary: Iterable[AuxiliaryOptimizer] = (),
    exclusion: Iterable[str] = (),
    inclusion: Iterable[str] = (),
) -> dict[str, str]:
    """Maps the path of each trained weight to the name of its optimizer; "" is the main optimizer.

    Args:
      paths: Paths of all weights, such as "softmax/w".
      auxiliary: Optimizers for the weights that match each optimizer's pattern. Other weights use
        the main optimizer.
      exclusion: Patterns of frozen weights, which must match complete paths.
      inclusion: Patterns of trained weights, which must match complete paths. If empty, all weights
        are trained.

    Raises:
      ConfigError: A pattern matches no weight, no weight is trained, an auxiliary optimizer matches
        only frozen weights, or two auxiliary optimizers match the same weight. The message lists
        the weights.
    """
    # A weight is frozen if it is excluded or, given patterns for inclusion, if it is not included.
    frozen = matched_paths(paths, exclusion, "Learner.bprop_variable_exclusion", fullmatch=True)
    if inclusion:
        setting = "Learner.bprop_variable_inclusion"
        frozen |= set(paths) - matched_paths(paths, inclusion, setting, fullmatch=True)
    if paths and len(frozen) == len(paths):
        raise ConfigError(
            f"Learner.bprop_variable_exclusion is {list(exclusion)}, which freezes every weight. "
            f"{_weights_of_model(paths)} Exclude fewer weights."
        )
    names = {path: "" for path in paths if path not in frozen}
    for aux in auxiliary:
        setting = f"The regex of the auxiliary optimizer '{aux.name}'"
        matched = matched_paths(paths, (aux.regex,), setting)
        if matched <= frozen:
            raise ConfigError(
                f"{setting}, {aux.regex!r}, matches only frozen weights: "
                f"{first_few(sorted(matched), 5)}. Remove the optimizer, or train these weights "
                "(bprop_variable_exclusion, bprop_variable_inclusion)."
            )
        for path in sorted(matched - frozen):
            if names[path]:
                raise ConfigError(
                    f"The weight {path} matches both auxiliary optimizers '{names[path]}' and "
                    f"'{aux.name}', but only one of them can update it. Change one of the regexes."
                )
            names[path] = aux.name
    return names


def matched_paths(
    paths: Collection[str], patterns: Iterable[str], setting: str, *, fullmatch: bool = False
) -> set[str]:
    """Returns the paths that match any of the patterns.

    Args:
      paths: Paths of all weights.
      patterns: Regular expressions.
      setting: Name of the setting, for messages.
      fullmatch: Whether patterns must match complete paths instead of the start of a path.

    Raises:
      ConfigError: A pattern matches no weight.
    """
    matched: set[str] = set()
    match = re.fullmatch if fullmatch else re.match
    for pattern in patterns:
        matches = {path for path in paths if match(pattern, path)}
        if not matches:
            hint = ", which does not begin with params/" if pattern.startswith("params/") else ""
            raise ConfigError(
                f"{setting}: {pattern!r} matches no weight.{did_you_mean(pattern, paths)} "
                f"{_weights_of_model(paths)} A pattern must match the "
                f"{'complete path' if fullmatch else 'start of a path'}{hint}."
            )
        matched |= matches
    return matched


def _weights_of_model(paths: Collection[str]) -> str:
    if not paths:
        return "The model has no weights."
    number = "one weight" if len(paths) == 1 else f"{len(paths)} weights"
    return f"The model has {number}: {first_few(list(paths), 5)}."
