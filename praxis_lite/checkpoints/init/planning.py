"""Applies loading rules to plan which checkpoint each array in a new state is loaded from."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.nnx_checkpoint import NnxCheckpoint
from praxis_lite.checkpoints.init.sources import SETTING, located, opened
from praxis_lite.config.paths import join
from praxis_lite.core.errors import ConfigError, did_you_mean, first_few
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.host.object_stores import AnyPath


class Source(NamedTuple):
    """The array in a checkpoint from which an array of a new state is loaded.

    Attributes:
      directory: Directory of the checkpoint.
      step: Step of the checkpoint, or None for an Orbax checkpoint without steps.
      rule: The rule that selected the array, as text.
      path: Path in the checkpoint.
      cast_from: The dtype in the checkpoint if the array is cast, else None.
    """

    directory: AnyPath
    step: int | None
    rule: str
    path: str
    cast_from: Any = None


@dataclasses.dataclass(frozen=True)
class InitPlan:
    """The arrays to load into a new TrainState. All other arrays are initialized as usual.

    Attributes:
      layout: Layout of the TrainState.
      sources: The source of each loaded array, keyed by the array's path in the state.
      step: (first step, directory of the checkpoint that determines it), or None to start at 0.
      left_out: Names of the arrays that no rule loads, for each checkpoint that was written by a
        different library.
    """

    layout: StateLayout
    sources: Mapping[str, Source]
    step: tuple[int, AnyPath] | None
    left_out: Mapping[str, Sequence[str]]

    def summary(self) -> list[str]:
        """Summarizes the loaded arrays, their sources and rules, and the new arrays."""
        loaded, new = collections.defaultdict(list), collections.defaultdict(list)
        for path in self._paths():
            item, source = path.partition("/")[0], self.sources.get(path)
            if source is None:
                new[item].append(name_of(path))
            else:
                # The key is (item, directory, step, rule).
                loaded[item, *source[:3]].append(self._line(path))
        lines = [
            f"{item}: {len(names)} from {source_text(directory, step)} by {rule}: "
            f"{first_few(names)}"
            for (item, directory, step, rule), names in loaded.items()
        ]
        initialized = {"mdl_vars": "at random", "opt_states": "from the weights"}
        for item, method in initialized.items():
            if new[item]:
                new_names = first_few(new[item])
                lines.append(f"{item}: {len(new[item])} initialized {method}: {new_names}")
        for where, names in self.left_out.items():
            lines += [f"left out of {where}: {first_few(names, 8)}"] if names else []
        step, directory = self.step or (0, None)
        return [*lines, f"step: {step}" + (f" of {directory}" if directory else "")]

    def lines(self) -> list[str]:
        """Returns the summary, followed by a line for each array."""
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
    """Returns the name by which rules refer to a path in a state."""
    return path.removeprefix("mdl_vars/")


def source_text(directory: AnyPath, step: int | None) -> str:
    """Formats a checkpoint as "step 3 in DIRECTORY", or as "DIRECTORY" if it has no steps."""
    return str(directory) if step is None else f"step {step} in {directory}"


def plan_init(layout: StateLayout, rules: Mapping[str, CheckpointLoadingRules]) -> InitPlan:
    """Applies rules to checkpoint manifests, without reading arrays.

    Args:
      layout: Layout of the new TrainState.
      rules: Rules in order of precedence, keyed by directory or by any name.

    Raises:
      ConfigError: A checkpoint does not exist, a pattern matches nothing, or an array to which a
        rule refers is missing or has a different logical shape or dtype.
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
            assert planner.step is not None, "`check` requires it."
            step = planner.step, planner.directory
    return InitPlan(layout, sources, step, _left_out(sources))


def _left_out(sources: Mapping[str, Source]) -> dict[str, list[str]]:
    """Returns the arrays that no rule loads, for each checkpoint written by another library."""
    left_out = {}
    for directory, step in dict.fromkeys(source[:2] for source in sources.values()):
        if NnxCheckpoint.is_at(directory):
            taken = [s.path for s in sources.values() if s[:2] == (directory, step)]
            names = NnxCheckpoint(directory).left_out(taken, step)
            left_out[source_text(directory, step)] = names
    return left_out


class _Planner:
    """Applies one checkpoint's rules: adds loaded arrays to `sources`, and collects errors."""

    def __init__(
        self,
        key: str,
        rules: CheckpointLoadingRules,
        layout: StateLayout,
        sources: dict[str, Source],
    ):
        self.key, self.rules, self.sources = key, rules, sources
        self.expected = {leaf.path: leaf for leaf in layout.leaves()}
        self.errors: list[str] = []
        # Maps the path in the state of each weight loaded from this checkpoint to its path in the
        # checkpoint. Both are relative to "params".
        self.weights: dict[str, str] = {}
        self.directory, step = located(key, rules)
        with opened(self.directory) as saved:
            self.saved = saved.leaves(step)
            if step == "best":
                assert isinstance(saved, Checkpoints), "`located` has checked it."
                step = saved.best_step()
            self.step = saved.latest_step() if step is None else step

    def mdl_vars(self) -> None:
        """Adds the variables matched by load rules."""
        names = [name_of(path) for path in self.expected if path.startswith("mdl_vars/")]
        used = set()
        for name in names:
            rule = self._rule_of(name)
            # Earlier checkpoints take precedence.
            if rule is not None and f"mdl_vars/{name}" not in self.sources:
                pattern, template = rule
                used.add(pattern)
                match = re.match(pattern, name)
                assert match is not None, "`_rule_of` returns rules that match."
                source = template.format(*match.groups("")).replace(".", "/")
                self._add(
                    f"mdl_vars/{name}", self._stored_path(source), f"{pattern!r}: {template!r}"
                )
                self.weights[name.removeprefix("params/")] = _weight(source)
        # A pattern without effect is probably a typo.
        if self.rules.safe_load:
            unused = [pattern for pattern, _ in self.rules.load_rules if pattern not in used]
            unused += [p for p in self.rules.ignore_rules if not any(_matching(p, names))]
            # Cast rules may also name opt_states.
            everything = [name_of(path) for path in self.expected]
            unused += [p for p in self.rules.cast_rules if not any(_matching(p, everything))]
            self.errors += [_why_unused(pattern, names) for pattern in unused]

    def opt_states(self) -> None:
        """Adds all opt_states, unless some are already loaded from an earlier checkpoint."""
        if self.rules.load_opt_states and not any(map(_is_of_opt_states, self.sources)):
            for path in sorted(filter(_is_of_opt_states, self.expected.keys() | self.saved.keys())):
                self._add(path, path, "load_opt_states")

    def partial_opt_states(self) -> None:
        """Adds the slots and step counts for weights that are loaded from this checkpoint.

        Without the step count, the bias correction for step 1 would be applied to loaded moments.
        """
        if not self.rules.partial_load_opt_states:
            return
        prefix = "mdl_vars/params/"
        params = {path.removeprefix(prefix) for path in self.expected if path.startswith(prefix)}
        rule, groups, other_paths = "partial_load_opt_states", set(), []
        for path in filter(_is_of_opt_states, self.expected):
            weight = _weight_within(path, params)
            if weight is None:
                other_paths.append(path)
            elif weight in self.weights:
                # A slot's path contains the path of its weight. Replace that part by the weight's
                # path in the checkpoint.
                before, after = f"/{path}/".split(f"/{weight}/", 1)
                source = f"{before}/{self.weights[weight]}/{after}".strip("/")
                if self._agrees(path, source):
                    self._add(path, source, rule)
                    groups.add(_group_of(path))
        if groups:  # Also load the learner's count of updates.
            groups.add("opt_states/num_updates")
        for path in other_paths:
            if _group_of(path) in groups and self._agrees(path, path):
                self._add(path, path, rule)

    def check(self) -> None:
        if self.rules.load_step and self.step is None:
            self.errors.append("it has no step for load_step")
        if self.errors:
            raise ConfigError(
                f"{join(SETTING, self.key)}, {source_text(self.directory, self.step)}: "
                f"{first_few(self.errors, 5, '; ')}. Change the rules, or add variables that "
                "should stay new to ignore_rules."
            )

    def _rule_of(self, name: str) -> tuple[str, str] | None:
        if any(re.match(pattern, name) for pattern in self.rules.ignore_rules):
            return None
        return next((rule for rule in self.rules.load_rules if re.match(rule[0], name)), None)

    def _stored_path(self, source: str) -> str:
        """Returns the checkpoint path of the array to which a template refers."""
        is_average = source.startswith("ema/") or (
            self.rules.load_ema_states and source.startswith("params/")
        )
        if not is_average:
            return f"mdl_vars/{source}"
        if not any(path.startswith("opt_states/ema/") for path in self.saved):
            self.errors = ["it has no moving averages (opt_states/ema)"]
        # A frozen weight has no average, because it does not change.
        average = f"opt_states/ema/{_weight(source)}"
        return average if average in self.saved else f"mdl_vars/params/{_weight(source)}"

    def _add(self, path: str, source: str, rule: str) -> None:
        """Adds an array's source, or an error if the source is missing or has the wrong type."""
        expected, saved = self.expected.get(path), self.saved.get(source)
        if expected is None:
            self.errors.append(f"{path} is only in the checkpoint")
        elif saved is None:
            near = did_you_mean(name_of(source), map(name_of, self.saved))
            self.errors.append(f"{name_of(source)}, for {name_of(path)}, is missing.{near}")
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
        expected, saved = self.expected[path], self.saved.get(source)
        if path in self.sources or saved is None:
            return False
        is_named = any(re.match(pattern, name_of(path)) for pattern in self.rules.cast_rules)
        return _shown(expected) == _shown(saved) or (is_named and _can_be_cast(saved, expected))


def _weight(name: str) -> str:
    return name.removeprefix("ema/").removeprefix("params/")


def _is_of_opt_states(path: str) -> bool:
    return path.startswith("opt_states/")


def _group_of(path: str) -> str:
    """Returns "opt_states/slots/GROUP", the optimizer group of a slot."""
    return "/".join(path.split("/")[:3])


def _weight_within(path: str, weights: set[str]) -> str | None:
    """Returns the longest weight path that is contained in a slot's path, or None."""
    names = path.split("/")
    for length in range(len(names), 0, -1):
        for start in range(len(names) - length + 1):
            if (part := "/".join(names[start : start + length])) in weights:
                return part
    return None


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if re.match(pattern, name)]


def _why_unused(pattern: str, names: Sequence[str]) -> str:
    if matches := _matching(pattern, names):
        return (
            f"the pattern {pattern!r} loads nothing, because its matches ({first_few(matches)}) "
            "are loaded by an earlier rule or ignored"
        )
    if _matching(pattern, [name.partition("/")[2] for name in names]):
        return f"the pattern {pattern!r} matches nothing: prefix it with 'params/'"
    return f"the pattern {pattern!r} matches no variable; the variables are {first_few(names)}"


def _shown(leaf: LeafLayout | jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _can_be_cast(saved: jax.ShapeDtypeStruct, expected: LeafLayout) -> bool:
    are_floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (saved, expected))
    return are_floating and saved.dtype != expected.dtype and saved.shape == tuple(expected.shape)
