"""The initial state for a job that starts from other checkpoints."""

import dataclasses
from collections.abc import Collection, Mapping

import jax
from jax.sharding import Mesh

from praxis_lite.checkpoints.init.initial_state import Note
from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.packed_layouts import pack_weight, packed_paths, unpacked_layout
from praxis_lite.checkpoints.init.planning import InitPlan, plan_init
from praxis_lite.checkpoints.init.sources import opened
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.job.job_dir import JobDir


class FromCheckpoints:
    """The initial state defined by `run.init_from_checkpoint_rules`."""

    def __init__(self, rules: Mapping[str, CheckpointLoadingRules], layout: StateLayout):
        self.plan, self._layout = plan_init(unpacked_layout(layout), rules), layout

    @property
    def paths(self) -> Collection[str]:
        """Paths of the arrays that are loaded by the rules."""
        return packed_paths(self._layout, self.plan.sources)

    @property
    def step(self) -> int:
        """Step of the first checkpoint whose rules set load_step, or 0."""
        return self.plan.step[0] if self.plan.step else 0

    def keep(self, files: JobDir) -> None:
        """Writes init_from_checkpoint.txt."""
        lines = "\n".join(self.plan.lines()) + "\n"
        write_atomically(files.init_from_checkpoint_txt, lines.encode())

    def read(self, mesh: Mesh, note: Note) -> dict[str, jax.Array]:
        """Reads the arrays selected by the rules into their shards, keyed by path."""
        for line in self.plan.summary():
            note(line)
        note("initializing the state; init_from_checkpoint.txt lists the source of each array")
        arrays = _loaded(self.plan, mesh)
        return {
            stored_path: x
            for path, weight in arrays.items()
            for stored_path, x in pack_weight(self._layout, path, weight, mesh).items()
        }


def _loaded(plan: InitPlan, mesh: Mesh) -> dict[str, jax.Array]:
    expected, arrays = {leaf.path: leaf for leaf in plan.layout.leaves()}, {}

    def as_stored(path: str) -> LeafLayout:
        dtype = plan.sources[path].cast_from or expected[path].dtype
        return dataclasses.replace(expected[path], dtype=dtype)

    # All processes must read in the same order, so read in the order of the plan.
    for directory, step in dict.fromkeys(source[:2] for source in plan.sources.values()):
        remaining = {
            path: source.path
            for path, source in plan.sources.items()
            if source[:2] == (directory, step)
        }
        with opened(directory) as saved:
            while remaining:
                # Several arrays may be loaded from the same stored array. Each pass reads the
                # stored array for one of these arrays.
                targets = {source: path for path, source in remaining.items()}
                actual = saved.restore_leaves(
                    {source: as_stored(path) for source, path in targets.items()}, mesh, step=step
                )
                for source, path in targets.items():
                    arrays[path] = actual[source].astype(expected[path].dtype)
                    del remaining[path]
    return arrays
