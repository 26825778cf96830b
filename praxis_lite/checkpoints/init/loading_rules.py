"""How a state starts from another checkpoint: patterns of names, and the names they stand for.

Pax's CheckpointLoadingRules, but that no config of the source's task is needed: a checkpoint says
what it has.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.leaf_paths import path_pattern

# The load rule that takes every weight under its own path.
LOAD_ALL = ("(.*)", "{}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointLoadingRules:
    """Which variables a checkpoint gives, and under which names it has them.

    Names are those under mdl_vars, as in Pax: "params/softmax/logits_ffn/linear/w",
    "non_trainable/...". Patterns are matched from their start (`re.match`).

    Attributes:
      load_rules: (pattern, template) each. A variable whose name matches is loaded from the one
        named `template.format(*groups)`, with "/" or "." between names; "ema/params/..." is the
        moving average of a weight. The first match wins. LOAD_ALL takes all as they are.
      ignore_rules: patterns of variables that this checkpoint never provides.
      cast_rules: patterns of variables that may have another floating dtype in the checkpoint, and
        are cast; those of opt_states begin with "opt_states/". Without it that is an error.
      directory: of the job, of its checkpoints, or of one step; by default the key of these rules.
      experiment: the one that trains that job, for the error if there is no checkpoint.
      step: a number, "best" by the metric that the job was told of, or None for the newest.
      load_step: the state's step, and with it the place in the training data, is the checkpoint's.
        The first checkpoint that says so wins.
      load_opt_states: all opt_states too; the first checkpoint wins.
      partial_load_opt_states: the slots of the weights that are loaded, where they have the same
        place, shape and dtype, and the counts of their optimizers, from which schedules continue.
      load_ema_states: "params/..." are taken from the moving averages too, where there are any.
      safe_load: a pattern that matches nothing is an error.

    Raises:
      ConfigError: a pattern or a template cannot be read, or two settings exclude each other.
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
                    f"{name}: the template {template!r} has a place that no group "
                    f"of {pattern!r} fills. Put in brackets what each {{}} stands for."
                ) from None
        if self.load_opt_states and self.partial_load_opt_states:
            raise ConfigError(
                f"{name}: load_opt_states is all or nothing, partial_load_opt_states what agrees: "
                "set one of them."
            )


def _is_pair_of_str(rule: Any) -> bool:
    return isinstance(rule, list | tuple) and [type(x) for x in rule] == [str, str]
