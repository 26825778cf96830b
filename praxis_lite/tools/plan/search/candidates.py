"""Ways to lay an experiment out: meshes, presets, remat, micro-batches, pipeline schedules."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.layers.stacking.pipelining.schedules import Schedule
from praxis_lite.tools.plan.search.formulas import POLICIES, Layout, Shape, peak_bytes, step_seconds
from praxis_lite.tools.plan.topology import Topology

AXES = ("replica", "data", "mdl")
# Presets of one word that are candidates, and what `mdl` splits in them.
_PRESETS = {
    "fsdp": "rows", "replicated": "rows", "megatron": "features", "fsdp+tensor": "features",
    "fsdp+ring": "features", "fsdp+mlp_ring": "features", "fsdp+context": "time",
}
_MOST_TENSOR = 32


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to lay a job out, as lines for --set, with figures by formulas."""

    settings: tuple[str, ...]
    layout: Layout
    preset: str
    seconds: float
    bytes: float

    @property
    def name(self) -> str:
        shape = "x".join(map(str, (self.layout.replica, self.layout.data, self.layout.mdl)))
        micro = f", {self.layout.micro_batches} micro-batches" * (self.layout.micro_batches > 1)
        return f"{self.preset} on {shape}, {self.layout.policy}{micro}"


def candidates(config: "fdl.Config", shape: Shape, topology: Topology) -> Iterator[Candidate]:
    """Yields every mesh, preset, policy and number of micro-batches that go together."""
    dcn = math.prod(config.mesh.dcn_mesh_shape or (1,))
    per_slice = len(topology.devices) // dcn
    paths = list(paths_of(config.task, "checkpoint_policy", "task"))
    policies = tuple(POLICIES) if paths else ("save_everything",)
    if next(paths_of(config.task, "num_microbatches", "task"), None):
        yield from _pipelines(config, shape, topology, paths)
        return
    has_micro = "gradient_accumulation_steps" in _arguments(config.task.learner)
    for (replica, data, mdl), (preset, splits), policy in itertools.product(
        _meshes(per_slice), _PRESETS.items(), policies
    ):
        if (mdl == 1) != (splits == "rows"):
            continue
        if preset == "replicated" and (data > 1 or mdl > 1):
            continue
        if preset in ("fsdp",) and replica > 1 and replica == per_slice:
            continue
        for micro in _micro_batches(shape, replica * data * mdl) if has_micro else (1,):
            layout = Layout(
                replica=replica * dcn, data=data, mdl=mdl, mdl_splits=splits,
                gathers_weights=preset.startswith("fsdp"), policy=policy, micro_batches=micro,
            )
            settings = [
                f"SHARDING_PRESET={preset}", f"mesh.ici_mesh_shape=({replica},{data},{mdl})",
                "mesh.allow_split_physical_axes=true", *(f"{path}={policy}" for path in paths),
            ]
            if has_micro and micro > 1:
                settings.append(f"task.learner.gradient_accumulation_steps={micro}")
            yield Candidate(
                tuple(settings), layout, preset, step_seconds(shape, layout, topology.chip),
                peak_bytes(shape, layout),
            )


def _pipelines(
    config: "fdl.Config", shape: Shape, topology: Topology, paths: Sequence[str]
) -> Iterator[Candidate]:
    """Yields schedules of a pipeline on the experiment's own mesh, with its own splits."""
    (path,) = paths_of(config.task, "num_microbatches", "task")
    stack = path.removesuffix(".num_microbatches")
    pipeline = config
    for name in stack.split("."):
        pipeline = getattr(pipeline, name)
    stages, layers = pipeline.num_stages, shape.num_layers
    sizes = dict(zip(config.mesh.axis_names, config.mesh.ici_mesh_shape, strict=True))
    of_stages, mdl = sizes.pop("stage", stages), sizes.pop("mdl", 1)
    layout = Layout(
        replica=math.prod(sizes.values()), data=of_stages, mdl=mdl,
        mdl_splits="features" if mdl > 1 else "rows", gathers_weights=False,
    )
    repeats = [element for element in (1, 2, 4) if layers % (element * stages) == 0]
    numbers = [one for one in (1, 2, 4, 8, 16, 32) if shape.rows % one == 0]
    for repeat, number, policy in itertools.product(repeats, numbers, POLICIES):
        if repeat > 1 and number < stages:
            continue
        item = dataclasses.replace(layout, policy=policy)
        idle = Schedule(stages, number, repeat).bubble_share
        settings = [f"{path}={number}", f"{stack}.circular_repeat={repeat}"]
        settings += [f"{where}={policy}" for where in paths]
        yield Candidate(
            tuple(settings), item, f"{number} microbatches, {repeat} times round,",
            step_seconds(shape, item, topology.chip) / (1 - idle),
            peak_bytes(shape, item),
        )


def spread(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yields candidates, best first, but each preset and policy once before any of them again."""
    left = list(found)
    while left:
        seen: set[tuple[str, str]] = set()
        later = []
        for item in left:
            key = (item.preset, item.layout.policy)
            if key in seen:
                later.append(item)
            else:
                seen.add(key)
                yield item
        left = later


def paths_of(config: Any, argument: str, path: str) -> Iterator[str]:
    """Yields the paths of all configs that take an argument of that name, each with the name."""
    if isinstance(config, fdl.Buildable):
        if argument in _arguments(config):
            yield f"{path}.{argument}"
        for name, value in config.__arguments__.items():
            yield from paths_of(value, argument, f"{path}.{name}")
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from paths_of(value, argument, f"{path}[{index}]")


def _arguments(config: Any) -> frozenset[str]:
    if not isinstance(config, fdl.Buildable):
        return frozenset()
    return frozenset(config.__signature_info__.parameters)


def _meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    for mdl in range(1, min(devices, _MOST_TENSOR) + 1):
        for replica in range(1, devices // mdl + 1):
            if devices % (mdl * replica) == 0:
                yield replica, devices // (mdl * replica), mdl


def _micro_batches(shape: Shape, devices: int) -> list[int]:
    most = max(1, shape.rows // devices)
    return [number for number in (1, 2, 4, 8) if number <= most and shape.rows % number == 0]
