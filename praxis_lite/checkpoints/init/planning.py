"""Rules applied: the checkpoint that each array of a new state comes from, and errors in them."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.nnx_checkpoint import NnxCheckpoint
from praxis_lite.checkpoints.init.sources import SETTING, located, opened
from praxis_lite.config.paths import join
from praxis_lite.core.errors import ConfigError, did_you_mean, few
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout


class Source(NamedTuple):
    """Where an array comes from.

    Attributes:
      directory: of the checkpoint.
      step: of the checkpoint, or None if it is one of Orbax's without steps.
      rule: as text.
      path: in the checkpoint.
      cast_from: the array's dtype there, or None if it is the one that is wanted.
    """

    directory: Path
    step: int | None
    rule: str
    path: str
    cast_from: Any = None


@dataclasses.dataclass(frozen=True)
class InitPlan:
    """The arrays loaded into a new TrainState; all else is as without it.

    Attributes:
      layout: of the TrainState.
      sources: of what is loaded, by path in the state.
      step: the one to start at and the checkpoints that say so, or None to start at 0.
      left_out: what no rule takes of checkpoints that other libraries wrote, by their places.
    """

    layout: StateLayout
    sources: Mapping[str, Source]
    step: tuple[int, Path] | None
    left_out: Mapping[str, Sequence[str]]

    def summary(self) -> list[str]:
        """Returns a few lines: how much comes from where, by which rule, and the new weights."""
        loaded, new = collections.defaultdict(list), collections.defaultdict(list)
        for path in self._paths():
            item, source = path.partition("/")[0], self.sources.get(path)
            if source is None:
                new[item].append(name_of(path))
            else:
                loaded[item, *source[:3]].append(self._line(path))
        lines = [
            f"{item}: {len(names)} from {place(directory, step)} by {rule}: {few(names)}"
            for (item, directory, step, rule), names in loaded.items()
        ]
        for item, how in (("mdl_vars", "drawn"), ("opt_states", "made from these weights")):
            if new[item]:
                lines.append(f"{item}: {len(new[item])} new, {how}: {few(new[item])}")
        for where, names in self.left_out.items():
            lines += [f"left out of {where}: {few(names, 8)}"] if names else []
        step, directory = self.step or (0, None)
        return [*lines, f"step: {step}" + (f" of {directory}" if directory else "")]

    def lines(self) -> list[str]:
        """Returns the summary, and a line for each array."""
        return [*self.summary(), "", *map(self._line, self._paths())]

    def _paths(self) -> Iterable[str]:
        return (leaf.path for leaf in self.layout.leaves() if leaf.path != "step")

    def _line(self, path: str) -> str:
        source = self.sources.get(path)
        if source is None:
            return f"{name_of(path)}: new"
        cast = f" (cast from {source.cast_from})" if source.cast_from else ""
        return name_of(path) + ("" if source.path == path else f" <- {name_of(source.path)}") + cast


def name_of(path: str) -> str:
    """Returns the name that rules use for a path in a state."""
    return path.removeprefix("mdl_vars/")


def place(directory: Path, step: int | None) -> str:
    """Returns "step 3 in DIRECTORY"."""
    return str(directory) if step is None else f"step {step} in {directory}"


def plan_init(layout: StateLayout, rules: Mapping[str, CheckpointLoadingRules]) -> InitPlan:
    """Returns the plan that the rules give; reads the checkpoints' manifests, no array.

    Args:
      layout: of the TrainState to start with.
      rules: by directory, or by any name; in the order in which they are asked.

    Raises:
      ConfigError: there is no checkpoint; a pattern matches nothing; what a rule names is not in
        the checkpoint, or has another unpadded shape or dtype there. Lists them.
    """
    sources: dict[str, Source] = {}
    step = None
    for key, rule in rules.items():
        planner = _Planner(key, rule, layout, sources)
        planner.mdl_vars()
        planner.opt_states()
        planner.partial_opt_states()
        planner.check()
        if rule.load_step and step is None:
            step = planner.step, planner.directory
    return InitPlan(layout, sources, step, _left_out(sources))


def _left_out(sources: Mapping[str, Source]) -> dict[str, list[str]]:
    """Returns the arrays of other libraries' checkpoints that no rule takes, by their places."""
    result = {}
    for directory, step in dict.fromkeys(source[:2] for source in sources.values()):
        if NnxCheckpoint.is_at(directory):
            taken = [s.path for s in sources.values() if s[:2] == (directory, step)]
            result[place(directory, step)] = NnxCheckpoint(directory).left_out(taken, step)
    return result


class _Planner:
    """Adds to `sources` the arrays that a checkpoint gives, and notes errors."""

    def __init__(
        self,
        key: str,
        rules: CheckpointLoadingRules,
        layout: StateLayout,
        sources: dict[str, Source],
    ):
        self.key, self.rules, self.sources = key, rules, sources
        self.wanted = {leaf.path: leaf for leaf in layout.leaves()}
        self.errors: list[str] = []
        # The weights that this checkpoint gives, by path under params, and what they are there.
        self.weights: dict[str, str] = {}
        self.directory, step = located(key, rules)
        with opened(self.directory) as saved:
            self.saved = saved.leaves(step)
            named = saved.best_step() if step == "best" else step
            self.step = saved.latest_step() if named is None else named

    def mdl_vars(self) -> None:
        """Finds what each variable comes from that a rule matches."""
        names = [name_of(path) for path in self.wanted if path.startswith("mdl_vars/")]
        used = set()
        for name in names:
            rule = self._rule_of(name)
            if rule is not None and f"mdl_vars/{name}" not in self.sources:
                pattern, template = rule
                used.add(pattern)
                groups = re.match(pattern, name).groups("")
                source = template.format(*groups).replace(".", "/")
                self._take(f"mdl_vars/{name}", self._stored(source), f"{pattern!r}: {template!r}")
                self.weights[name.removeprefix("params/")] = _weight(source)
        if self.rules.safe_load:
            unused = [pattern for pattern, _ in self.rules.load_rules if pattern not in used]
            unused += [p for p in self.rules.ignore_rules if not any(_matching(p, names))]
            everything = [name_of(path) for path in self.wanted]
            unused += [p for p in self.rules.cast_rules if not any(_matching(p, everything))]
            self.errors += [_why_unused(pattern, names) for pattern in unused]

    def opt_states(self) -> None:
        """Finds all opt_states, unless an earlier checkpoint gives some."""
        if self.rules.load_opt_states and not any(map(_is_of_opt_states, self.sources)):
            for path in sorted(filter(_is_of_opt_states, self.wanted.keys() | self.saved.keys())):
                self._take(path, path, "load_opt_states")

    def partial_opt_states(self) -> None:
        """Finds slots of the weights that this checkpoint gives, and the counts that go with them.

        Moments without their count would be corrected as those of a first step are.
        """
        if not self.rules.partial_load_opt_states:
            return
        prefix = "mdl_vars/params/"
        params = {path.removeprefix(prefix) for path in self.wanted if path.startswith(prefix)}
        rule, groups, of_no_weight = "partial_load_opt_states", set(), []
        for path in filter(_is_of_opt_states, self.wanted):
            weight = _weight_within(path, params)
            if weight is None:
                of_no_weight.append(path)
            elif weight in self.weights:
                before, after = f"/{path}/".split(f"/{weight}/", 1)
                source = f"{before}/{self.weights[weight]}/{after}".strip("/")
                if self._agrees(path, source):
                    self._take(path, source, rule)
                    groups.add(_group_of(path))
        if groups:  # The learner's count of updates goes with theirs.
            groups.add("opt_states/num_updates")
        for path in of_no_weight:
            if _group_of(path) in groups and self._agrees(path, path):
                self._take(path, path, rule)

    def check(self) -> None:
        if self.rules.load_step and self.step is None:
            self.errors.append("it has no step for load_step")
        if self.errors:
            raise ConfigError(
                f"{join(SETTING, self.key)}, {place(self.directory, self.step)}: "
                f"{few(self.errors, 5, '; ')}. Change the rules, or name what is to stay new in "
                "ignore_rules."
            )

    def _rule_of(self, name: str) -> tuple[str, str] | None:
        if any(re.match(pattern, name) for pattern in self.rules.ignore_rules):
            return None
        return next((rule for rule in self.rules.load_rules if re.match(rule[0], name)), None)

    def _stored(self, source: str) -> str:
        """Returns the path in the checkpoint of the array that a template names."""
        is_average = source.startswith("ema/") or (
            self.rules.load_ema_states and source.startswith("params/")
        )
        if not is_average:
            return f"mdl_vars/{source}"
        if not any(path.startswith("opt_states/ema/") for path in self.saved):
            self.errors = ["it has no moving averages (opt_states/ema)"]
        # A weight that was frozen has no average: it is its own.
        average = f"opt_states/ema/{_weight(source)}"
        return average if average in self.saved else f"mdl_vars/params/{_weight(source)}"

    def _take(self, path: str, source: str, rule: str) -> None:
        expected, saved = self.wanted.get(path), self.saved.get(source)
        if expected is None:
            self.errors.append(f"{path} is only in the checkpoint")
        elif saved is None:
            near = did_you_mean(name_of(source), map(name_of, self.saved))
            self.errors.append(f"{name_of(source)}, for {name_of(path)}, is not in it.{near}")
        elif self._agrees(path, source):
            cast_from = saved.dtype if saved.dtype != expected.dtype else None
            self.sources[path] = Source(self.directory, self.step, rule, source, cast_from)
        else:
            castable = " (cast_rules would cast it)" if _can_be_cast(saved, expected) else ""
            self.errors.append(
                f"{name_of(path)} is {_shown(expected)}, but {name_of(source)} is {_shown(saved)}"
                f"{castable}"
            )

    def _agrees(self, path: str, source: str) -> bool:
        expected, saved = self.wanted[path], self.saved.get(source)
        if path in self.sources or saved is None:
            return False
        is_named = any(re.match(pattern, name_of(path)) for pattern in self.rules.cast_rules)
        return _shown(expected) == _shown(saved) or (is_named and _can_be_cast(saved, expected))


def _weight(name: str) -> str:
    return name.removeprefix("ema/").removeprefix("params/")


def _is_of_opt_states(path: str) -> bool:
    return path.startswith("opt_states/")


def _group_of(path: str) -> str:
    """Returns "opt_states/slots/GROUP" of a slot's path: the group that its optimizer updates."""
    return "/".join(path.split("/")[:3])


def _weight_within(path: str, weights: set[str]) -> str | None:
    """Returns the longest path of a weight that a slot's path has in it, or None."""
    names = path.split("/")
    for length in range(len(names), 0, -1):
        for start in range(len(names) - length + 1):
            if (part := "/".join(names[start : start + length])) in weights:
                return part
    return None


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if re.match(pattern, name)]


def _why_unused(pattern: str, names: Sequence[str]) -> str:
    if result := _matching(pattern, names):
        return (
            f"the pattern {pattern!r} gives nothing: what it matches ({few(result)}) comes from "
            "an earlier rule or is ignored"
        )
    if _matching(pattern, [name.partition("/")[2] for name in names]):
        return f"the pattern {pattern!r} matches nothing: names begin with 'params/', put it before"
    return f"the pattern {pattern!r} matches no variable; there are {few(names)}"


def _shown(leaf: LeafLayout | jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _can_be_cast(saved: jax.ShapeDtypeStruct, expected: LeafLayout) -> bool:
    are_floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (saved, expected))
    return are_floating and saved.dtype != expected.dtype and saved.shape == tuple(expected.shape)
