"""Which array of a new state comes from which checkpoint, and by which rule; told in lines."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.core.errors import few
from praxis_lite.core.partitioner.train_state import StateLayout


class Source(NamedTuple):
    """Where an array comes from.

    Attributes:
      directory: of the checkpoint.
      step: of the checkpoint, or None if it is one of Orbax's without steps.
      rule: in words.
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
    """Returns the name by which rules know what lies at a path in a state."""
    return path.removeprefix("mdl_vars/")


def place(directory: Path, step: int | None) -> str:
    """Returns "step 3 in DIRECTORY"."""
    return str(directory) if step is None else f"step {step} in {directory}"
