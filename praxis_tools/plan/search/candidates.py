"""Enumerates candidate layouts: meshes, sharding presets, remat, microbatches and pipelines."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Schedule
from praxis_tools.plan.search.formulas import POLICIES, Layout, Shape, peak_bytes, step_seconds
from praxis_tools.plan.topology import Topology

AXES = ("replica", "data", "mdl")
# Maps each candidate preset to the dim of activations that is split over `mdl`.
_PRESETS = {
    "fsdp": "rows",
    "replicated": "rows",
    "megatron": "features",
    "fsdp+tensor": "features",
    "fsdp+ring": "features",
    "fsdp+mlp_ring": "features",
    "fsdp+context": "time",
}
_MAX_MDL = 32


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate layout of a job, with formula-based estimates.

    Attributes:
      settings: Values of --set that select the layout.
      layout: The layout as an input of the formulas.
      preset: Name of the sharding preset, or a description of the pipeline schedule.
      seconds: Estimated time of a train step.
      bytes: Estimated peak memory per device.
    """

    settings: tuple[str, ...]
    layout: Layout
    preset: str
    seconds: float
    bytes: float

    @property
    def name(self) -> str:
        shape = "x".join(map(str, (self.layout.replica, self.layout.data, self.layout.mdl)))
        num = self.layout.accumulation_steps
        microbatches = f", {num} microbatches" if num > 1 else ""
        return f"{self.preset} on {shape}, {self.layout.policy}{microbatches}"


def candidates(config: "fdl.Config", shape: Shape, topology: Topology) -> Iterator[Candidate]:
    """Yields all valid combinations of mesh, preset, remat policy and number of microbatches.

    If the experiment has a pipeline, yields pipeline schedules on the experiment's mesh instead.
    """
    dcn = math.prod(config.mesh.dcn_mesh_shape or (1,))
    per_slice = len(topology.devices) // dcn
    paths = list(paths_of(config.task, "checkpoint_policy", "task"))
    policies = tuple(POLICIES) if paths else ("save_everything",)
    if next(paths_of(config.task, "num_microbatches", "task"), None):
        yield from _pipelines(config, shape, topology, paths)
        return
    has_steps = "gradient_accumulation_steps" in _arguments(config.task.learner)
    for (replica, data, mdl), (preset, splits), policy in itertools.product(
        _meshes(per_slice), _PRESETS.items(), policies
    ):
        # The axis `mdl` must split something other than rows, unless its size is 1.
        if (mdl == 1) != (splits == "rows"):
            continue
        # The preset `replicated` does not use the axes `data` and `mdl`.
        if preset == "replicated" and (data > 1 or mdl > 1):
            continue
        # With all devices in `replica`, fsdp shards nothing.
        if preset == "fsdp" and replica > 1 and replica == per_slice:
            continue
        for steps in _accumulation_steps(shape, replica * data * mdl) if has_steps else (1,):
            layout = Layout(
                replica=replica * dcn,
                data=data,
                mdl=mdl,
                mdl_splits=splits,
                gathers_weights=preset.startswith("fsdp"),
                policy=policy,
                accumulation_steps=steps,
            )
            settings = [
                f"SHARDING_PRESET={preset}",
                f"mesh.ici_mesh_shape=({replica},{data},{mdl})",
                "mesh.allow_split_physical_axes=true",
                *(f"{path}={policy}" for path in paths),
            ]
            if has_steps and steps > 1:
                settings.append(f"task.learner.gradient_accumulation_steps={steps}")
            yield Candidate(
                tuple(settings),
                layout,
                preset,
                step_seconds(shape, layout, topology.chip),
                peak_bytes(shape, layout),
            )


def _pipelines(
    config: "fdl.Config", shape: Shape, topology: Topology, paths: Sequence[str]
) -> Iterator[Candidate]:
    """Yields pipeline schedules on the experiment's mesh, with unchanged weight splits."""
    (path,) = paths_of(config.task, "num_microbatches", "task")
    stack = path.removesuffix(".num_microbatches")
    pipeline = config
    for name in stack.split("."):
        pipeline = getattr(pipeline, name)
    stages, layers = pipeline.num_stages, shape.num_layers
    sizes = dict(zip(config.mesh.axis_names, config.mesh.ici_mesh_shape, strict=True))
    # The formulas treat stages like `data`, because they also split the weights.
    stage_size, mdl = sizes.pop("stage", stages), sizes.pop("mdl", 1)
    own_layout = Layout(
        replica=math.prod(sizes.values()),
        data=stage_size,
        mdl=mdl,
        mdl_splits="features" if mdl > 1 else "rows",
        gathers_weights=False,
    )
    repeats = [repeat for repeat in (1, 2, 4) if layers % (repeat * stages) == 0]
    numbers = [number for number in (1, 2, 4, 8, 16, 32) if shape.rows % number == 0]
    for repeat, number, policy in itertools.product(repeats, numbers, POLICIES):
        # A circular schedule requires a microbatch for each stage.
        if repeat > 1 and number < stages:
            continue
        layout = dataclasses.replace(own_layout, policy=policy)
        bubbles = Schedule(stages, number, repeat).bubble_share
        settings = [f"{path}={number}", f"{stack}.circular_repeat={repeat}"]
        settings += [f"{policy_path}={policy}" for policy_path in paths]
        yield Candidate(
            tuple(settings),
            layout,
            f"{number} microbatches, circular_repeat {repeat},",
            step_seconds(shape, layout, topology.chip) / (1 - bubbles),
            peak_bytes(shape, layout),
        )


def diversify(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Reorders candidates so that the first candidates differ in preset and remat policy.

    The best candidate for each (preset, policy) comes first, then the second best candidate for
    each, and so on.
    """
    num_seen: Counter[tuple[str, str]] = Counter()
    rounds = []
    for candidate in ranked:
        key = (candidate.preset, candidate.layout.policy)
        rounds.append(num_seen[key])
        num_seen[key] += 1
    by_round = sorted(zip(rounds, ranked, strict=True), key=lambda pair: pair[0])
    return [candidate for _, candidate in by_round]


def paths_of(config: Any, argument: str, path: str) -> Iterator[str]:
    """Yields the paths of all arguments with the given name in a config and its subconfigs."""
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
    for mdl in range(1, min(devices, _MAX_MDL) + 1):
        for replica in range(1, devices // mdl + 1):
            if devices % (mdl * replica) == 0:
                yield replica, devices // (mdl * replica), mdl


def _accumulation_steps(shape: Shape, devices: int) -> list[int]:
    most = max(1, shape.rows // devices)
    return [number for number in (1, 2, 4, 8) if number <= most and shape.rows % number == 0]
