"""Rules that select the variables to load from other checkpoints into a new state.

The rules are the same as in Pax, except that the source's task is not needed, because a
checkpoint's manifest describes its arrays.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.leaf_paths import path_pattern

# A load rule that loads every weight from the same path.
LOAD_ALL = ("(.*)", "{}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointLoadingRules:
    """Rules that map variables of a new state to the variables of a checkpoint.

    As in Pax, names are relative to mdl_vars: "params/softmax/logits_ffn/linear/w",
    "non_trainable/...". Patterns are matched with `re.match`, that is, from the start of the name.

    Attributes:
      load_rules: Pairs (pattern, template). A variable whose name matches the pattern is loaded
        from the name `template.format(*groups)`, with "/" or "." as separator. The name
        "ema/params/..." refers to the moving average of a weight. The first matching rule is used.
        LOAD_ALL loads all variables from the same names.
      ignore_rules: Patterns of variables that are not loaded from this checkpoint.
      cast_rules: Patterns of variables to cast if their floating dtype in the checkpoint differs,
        which is otherwise an error. Patterns for opt_states start with "opt_states/".
      directory: Directory of the job, of its checkpoints, or of one step. Defaults to the key of
        these rules.
      experiment: Name of the experiment that trains the source, for the error message if there is
        no checkpoint.
      step: The step, "best" for the best step by the metric in the source's settings, or None for
        the newest step.
      load_step: Whether the job starts at the checkpoint's step and position in the training data.
        If this is set for several checkpoints, the first one is used.
      load_opt_states: Whether to also load all opt_states. If this is set for several checkpoints,
        the first one is used.
      partial_load_opt_states: Whether to load the slots of the loaded weights if their paths,
        shapes and dtypes match. The step counts of their optimizers are loaded too, so that
        schedules continue.
      load_ema_states: Whether "params/..." in templates refers to the moving averages, if there are
        any.
      safe_load: Whether a pattern that matches nothing is an error.

    Raises:
      ConfigError: A pattern or a template is invalid, or two settings cannot be combined.
    """

    load_rules: Sequence[tuple[str, str]]
    ignore_rules: Sequence[str] = ()
    cast_rules: Sequence[str] = ()
    directory: str | None = None
    experiment: str | None = None
    step: int | Literal["best"] | None = None
    load_step: bool = False
    load_opt_states: bool = False
    partial_load_opt_states: bool = False
    load_ema_states: bool = False
    safe_load: bool = True

    def __post_init__(self) -> None:
        rules, name = self.load_rules, "CheckpointLoadingRules"
        are_pairs = not isinstance(rules, str) and all(map(_is_pair_of_str, rules))
        example = 'such as ((r"params/decoder/(.*)", "params/{}"),)'
        expected = f"pairs of a pattern and a template, {example}"
        require(are_pairs, f"{name}.load_rules", rules, expected)
        for setting in ("ignore_rules", "cast_rules"):
            actual = getattr(self, setting)
            is_text = isinstance(actual, str)
            require(not is_text, f"{name}.{setting}", actual, "a sequence of patterns")
        for pattern in (*(pattern for pattern, _ in rules), *self.ignore_rules, *self.cast_rules):
            path_pattern(name, pattern)
        for pattern, template in rules:
            try:
                template.format(*[""] * re.compile(pattern).groups)
            except (IndexError, KeyError, ValueError):
                raise ConfigError(
                    f"{name}: the template {template!r} does not match the pattern {pattern!r}; "
                    "expected at most one placeholder {} for each group in parentheses, and no "
                    "other braces. Add groups, or remove placeholders."
                ) from None
        if self.load_opt_states and self.partial_load_opt_states:
            raise ConfigError(
                f"{name}: load_opt_states cannot be combined with partial_load_opt_states. Remove "
                "one of them."
            )


def _is_pair_of_str(rule: Any) -> bool:
    return isinstance(rule, list | tuple) and [type(x) for x in rule] == [str, str]
