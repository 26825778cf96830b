"""Which array of a new state comes from which checkpoint: by rules, checked, and told."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.nnx_checkpoints import NnxCheckpoint, is_nnx_checkpoint
from praxis_lite.checkpoints.init.slot_paths import around_the_weight, group_of
from praxis_lite.checkpoints.steps.manifest import MANIFEST_JSON
from praxis_lite.checkpoints.steps.step_dirs import damaged, numbered_steps
from praxis_lite.config.paths import join
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.job.job_dir import local_directory
from praxis_lite.partitioner import StateLayout
from praxis_lite.partitioner.train_state import LeafLayout

SETTING = "run.init_from_checkpoint_rules"


class Source(NamedTuple):
    """Where an array comes from: a checkpoint, by which of its rules, and the path there.

    `step` is None of a checkpoint of Flax's, which has none; `cast_from` is the dtype that the
    array has there, if that is another.
    """

    directory: Path
    step: int | None
    rule: str
    path: str
    cast_from: Any = None


@dataclasses.dataclass(frozen=True)
class InitPlan:
    """What is loaded into a new TrainState; all else is as without it.

    Attributes:
      layout: of the TrainState.
      sources: of what is loaded, by path in the state.
      step: the one to start at, and the checkpoints that say so; None: 0.
    """

    layout: StateLayout
    sources: Mapping[str, Source]
    step: tuple[int, Path] | None

    def summary(self) -> list[str]:
        """Returns a few lines: how much comes from where, by which rule, and what is new."""
        loaded, new = collections.defaultdict(list), collections.defaultdict(list)
        for path in self._paths():
            item, source = path.partition("/")[0], self.sources.get(path)
            if source is None:
                new[item].append(_name(path))
            else:
                loaded[item, *source[:3]].append(self._line(path))
        lines = [
            f"{item}: {len(names)} from {_words(directory, step)} by {rule}: {_few(names)}"
            for (item, directory, step, rule), names in loaded.items()
        ]
        for item, how in (("mdl_vars", "drawn"), ("opt_states", "made from these weights")):
            if new[item]:
                lines.append(f"{item}: {len(new[item])} new, {how}: {_few(new[item])}")
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
            return f"{_name(path)}: new"
        cast = f" (cast from {source.cast_from})" if source.cast_from else ""
        return _name(path) + ("" if source.path == path else f" <- {_name(source.path)}") + cast


def plan_init(layout: StateLayout, rules: Mapping[str, CheckpointLoadingRules]) -> InitPlan:
    """Returns what the rules give; reads what the checkpoints say of themselves, no array.

    Args:
      layout: of the TrainState to start with.
      rules: by directory, or by any name; in the order in which they are asked.

    Raises:
      ConfigError: there is no checkpoint; a pattern matches nothing; what a rule names is not in
        the checkpoint, or has another true shape or dtype there. Lists them.
    """
    sources: dict[str, Source] = {}
    step = None
    for key, one in rules.items():
        planner = _Planner(key, one, layout, sources)
        planner.mdl_vars()
        planner.opt_states()
        planner.partial_opt_states()
        planner.check()
        if one.load_step and step is None:
            step = planner.step, planner.directory
    return InitPlan(layout, sources, step)


class _Planner:
    """Adds to `sources` what one checkpoint gives, and notes what is wrong."""

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
        self.directory, step = _located(key, rules)
        with opened(self.directory) as saved:
            self.saved = saved.leaves(step)
            named = saved.best_step() if step == "best" else step
            self.step = saved.latest_step() if named is None else named

    def mdl_vars(self) -> None:
        """Finds what each variable comes from that a rule matches."""
        names = [_name(path) for path in self.wanted if path.startswith("mdl_vars/")]
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
            everything = [_name(path) for path in self.wanted]
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
            before, weight, after = around_the_weight(path, params)
            if weight is None:
                of_no_weight.append(path)
            elif weight in self.weights:
                source = "/".join([*before, self.weights[weight], *after])
                if self._agrees(path, source):
                    self._take(path, source, rule)
                    groups.add(group_of(path))
        if groups:  # The learner's count of updates goes with theirs.
            groups.add("opt_states/num_updates")
        for path in of_no_weight:
            if group_of(path) in groups and self._agrees(path, path):
                self._take(path, path, rule)

    def check(self) -> None:
        if self.rules.load_step and self.step is None:
            self.errors.append("it has no step for load_step")
        if self.errors:
            more = f"; and {len(self.errors) - 5} more" if len(self.errors) > 5 else ""
            raise ConfigError(
                f"{join(SETTING, self.key)}, {_words(self.directory, self.step)}: "
                f"{'; '.join(self.errors[:5])}{more}. Change the rules, or name what is to stay "
                "new in ignore_rules."
            )

    def _rule_of(self, name: str) -> tuple[str, str] | None:
        if any(re.match(pattern, name) for pattern in self.rules.ignore_rules):
            return None
        return next((rule for rule in self.rules.load_rules if re.match(rule[0], name)), None)

    def _stored(self, source: str) -> str:
        """Returns the path in the checkpoint of what a template names."""
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
        wanted, saved = self.wanted.get(path), self.saved.get(source)
        if wanted is None:
            self.errors.append(f"{path} is only in the checkpoint")
        elif saved is None:
            near = did_you_mean(_name(source), map(_name, self.saved))
            self.errors.append(f"{_name(source)}, for {_name(path)}, is not in it.{near}")
        elif self._agrees(path, source):
            cast_from = saved.dtype if saved.dtype != wanted.dtype else None
            self.sources[path] = Source(self.directory, self.step, rule, source, cast_from)
        else:
            castable = " (cast_rules would cast it)" if _can_be_cast(saved, wanted) else ""
            self.errors.append(
                f"{_name(path)} is {_shown(wanted)}, but {_name(source)} is {_shown(saved)}"
                f"{castable}"
            )

    def _agrees(self, path: str, source: str) -> bool:
        wanted, saved = self.wanted[path], self.saved.get(source)
        if path in self.sources or saved is None:
            return False
        is_named = any(re.match(pattern, _name(path)) for pattern in self.rules.cast_rules)
        return _shown(wanted) == _shown(saved) or (is_named and _can_be_cast(saved, wanted))


def opened(
    directory: Path,
) -> contextlib.AbstractContextManager[Checkpoints | NnxCheckpoint]:
    """Returns the checkpoints of a job, or one that Flax's users made, to be read."""
    if is_nnx_checkpoint(directory):
        return contextlib.nullcontext(NnxCheckpoint(directory))
    return Checkpoints(directory)


def _located(key: str, rules: CheckpointLoadingRules) -> tuple[Path, int | str | None]:
    """Returns the directory of all steps, and which of them is meant."""
    given = local_directory(rules.directory or key)
    if is_nnx_checkpoint(given):
        return given, rules.step
    directory, step = given, rules.step
    if (given / "checkpoints").is_dir():
        directory = given / "checkpoints"
    elif given.name.isdigit() and (given / MANIFEST_JSON).is_file():
        directory, step = given.parent, int(given.name)
    steps = directory.is_dir() and (numbered_steps(directory) or damaged(directory))
    if not steps:
        experiment = rules.experiment or "NAME"
        raise ConfigError(
            f"There is no checkpoint in {given}, from which this job is to start. First train one: "
            f"main.py --exp={experiment} --job_log_dir={given}; or name a job that has one: --set "
            f"{join(join(SETTING, key), 'directory')}=DIR."
        )
    return directory, step


def _words(directory: Path, step: int | None) -> str:
    return str(directory) if step is None else f"step {step} in {directory}"


def _name(path: str) -> str:
    return path.removeprefix("mdl_vars/")


def _weight(name: str) -> str:
    return name.removeprefix("ema/").removeprefix("params/")


def _is_of_opt_states(path: str) -> bool:
    return path.startswith("opt_states/")


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if re.match(pattern, name)]


def _why_unused(pattern: str, names: Sequence[str]) -> str:
    if found := _matching(pattern, names):
        return (
            f"the pattern {pattern!r} gives nothing: what it matches ({_few(found)}) comes from "
            "an earlier rule or is ignored"
        )
    if _matching(pattern, [name.partition("/")[2] for name in names]):
        return f"the pattern {pattern!r} matches nothing: names begin with 'params/', put it before"
    return f"the pattern {pattern!r} matches no variable; there are {_few(names)}"


def _shown(leaf: LeafLayout | jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _can_be_cast(saved: jax.ShapeDtypeStruct, wanted: LeafLayout) -> bool:
    are_floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (saved, wanted))
    return are_floating and saved.dtype != wanted.dtype and saved.shape == tuple(wanted.shape)


def _few(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
