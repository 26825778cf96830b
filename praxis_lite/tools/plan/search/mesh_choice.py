"""The mesh of a job for as many devices as there are: by formulas the fastest legal mesh."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.weight_sharding import decide_shardings
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_lite.core.task import Task
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.run.experiment.experiment import Job
from praxis_lite.run.trainer.checks.datasets import check_reads
from praxis_lite.run.trainer.checks.memory import bytes_of_a_device, check_fits
from praxis_lite.run.trainer.job_on_mesh import partitioner_on
from praxis_lite.tools.plan.chips import CHIPS, Chip
from praxis_lite.tools.plan.predict import num_units
from praxis_lite.tools.plan.report import seconds_text
from praxis_lite.tools.plan.search.formulas import Layout, Shape, peak_bytes, step_seconds
from praxis_lite.tools.plan.topology import attached_topology

# Speeds of an accelerator that the plan does not know: they order meshes, and predict nothing.
_OF_UNKNOWN = CHIPS["h100"]
_SAME = 0.01  # Step times that differ by less count as equal.
_SLOTS = 2  # Elements that an optimizer keeps per weight, for the formulas: Adam's.


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A mesh with the formulas' figures of a train step on it.

    Attributes:
      mesh: its config.
      keeps_slices: it has as many slices as there are.
      seconds, bytes: of a step on a device.
      distance: from the experiment's own mesh: the sum of the logarithms of the axes' changes.
    """

    mesh: MeshConfig
    keeps_slices: bool
    seconds: float
    bytes: float
    distance: float


def chosen_mesh(job: Job, devices: Sequence[jax.Device]) -> MeshConfig:
    """Returns the mesh of a job for these devices, with the axes of its own mesh.

    Each way to factorize their number over the axes is a candidate; nothing has to divide. By the
    formulas' seconds of a step, the first one is taken that task and data accept and whose state
    fits the devices. Nothing is compiled. Of equally fast meshes the nearest to the job's own
    comes first.

    Raises:
      ConfigError: no candidate is legal, or fits; says how many devices could hold the state.
    """
    topology = attached_topology(devices)
    chip = _OF_UNKNOWN if topology is None else topology.chip
    candidates, refused, too_large = _ranked(job, devices, chip), [], []
    for candidate in candidates:
        try:
            partitioner = partitioner_on(job, make_mesh(candidate.mesh, devices))
            for name, pipeline in job.datasets.items():
                step = partitioner.train_step if name == TRAIN else partitioner.eval_step
                check_reads(step, checked_spec(pipeline, f"datasets.{name}"), f"datasets.{name}")
        except ConfigError as error:
            refused.append(error)
            continue
        try:
            check_fits(partitioner.layout, partitioner.mesh, "train")
        except ConfigError as error:
            held = sum(leaf.bytes_per_device for leaf in partitioner.layout.leaves())
            too_large.append((held, candidate.mesh, error))
            continue
        print(
            f"the mesh for {len(devices)} devices: {candidate.mesh.shape} of {len(candidates)}, by "
            f"formulas {seconds_text(candidate.seconds)} a step on {chip.name}", flush=True,
        )
        if not candidate.keeps_slices:
            print("note: mesh.dcn_mesh_shape is None now, for the slices do not divide an axis")
        return candidate.mesh
    if not too_large:
        raise refused[0]
    held, mesh, error = min(too_large, key=lambda item: item[0])
    available = bytes_of_a_device(devices)
    raise ConfigError(
        f"Of {len(candidates)} meshes of {len(devices)} devices none holds the state; {mesh.shape} "
        f"comes nearest. At least {math.ceil(held * len(devices) / available)} devices like these "
        f"are needed: --min_processes says from how many on the job goes on. {error}"
    )


def _ranked(job: Job, devices: Sequence[jax.Device], chip: Chip) -> list[_Candidate]:
    """Returns all candidates, the best first."""
    spec = checked_spec(job.datasets[TRAIN], f"datasets.{TRAIN}")
    rows = next(iter(jax.tree.leaves(spec))).shape[0]
    num_slices = _num_slices(job.mesh, devices)
    specs = job.task.model.weight_specs()
    candidates = []
    for sizes in _factorizations(len(devices), len(job.mesh.axis_names)):
        mesh = _mesh(job.mesh, sizes, num_slices, is_torus=chip.torus_dims > 0)
        shape, layout = _formula_terms(job.task, specs, mesh, rows, num_units(spec) // rows)
        candidates.append(_Candidate(
            mesh, math.prod(mesh.dcn_mesh_shape or (1,)) == num_slices,
            step_seconds(shape, layout, chip), peak_bytes(shape, layout),
            _distance(job.mesh, sizes),
        ))
    fastest = min(item.seconds for item in candidates)
    # How much of its host's memory a simulated device gets, `check_fits` asks.
    room = math.inf if chip.name == "cpu" else chip.hbm_bytes

    def rank(item: _Candidate) -> tuple:
        slower = round(math.log(item.seconds / fastest) / _SAME)
        return (
            not item.keeps_slices, item.bytes > room, slower, round(item.distance, 6),
            item.mesh.shape,
        )

    return sorted(candidates, key=rank)


def _factorizations(number: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Yields all tuples of `num_axes` sizes whose product is `number`."""
    if num_axes == 1:
        yield (number,)
        return
    for size in range(1, number + 1):
        if number % size == 0:
            for others in _factorizations(number // size, num_axes - 1):
                yield (size, *others)


def _num_slices(config: MeshConfig, devices: Sequence[jax.Device]) -> int:
    """Returns how many slices a mesh of these devices has; 1 where the job's own has 1."""
    if math.prod(config.dcn_mesh_shape or (1,)) == 1:
        return 1
    slices = Counter(getattr(device, "slice_index", None) for device in devices)
    if len(slices) == 1:
        slices = Counter(device.process_index for device in devices)
    # Slices of different sizes have no mesh between them.
    return len(slices) if len(set(slices.values())) == 1 else 1


def _mesh(
    config: MeshConfig, sizes: tuple[int, ...], num_slices: int, *, is_torus: bool
) -> MeshConfig:
    """Returns `config` with these sizes, its slices along the axis that most of them lay along."""
    shape, dcn = list(sizes), None
    if num_slices > 1:
        axis = config.dcn_mesh_shape.index(max(config.dcn_mesh_shape))
        if sizes[axis] % num_slices == 0:
            shape[axis] //= num_slices
            dcn = tuple(num_slices if k == axis else 1 for k in range(len(sizes)))
    return dataclasses.replace(
        config, ici_mesh_shape=tuple(shape), dcn_mesh_shape=dcn,
        # A torus that has lost a host seldom has dims of these sizes.
        allow_split_physical_axes=config.allow_split_physical_axes or is_torus,
    )


def _distance(config: MeshConfig, sizes: tuple[int, ...]) -> float:
    own = [abs(size) * dcn for size, dcn in zip(  # -1 counts as 1: it fits any number.
        config.ici_mesh_shape, config.dcn_mesh_shape or (1,) * len(sizes), strict=True
    )]
    return sum(abs(math.log(size / other)) for size, other in zip(sizes, own, strict=True))


def _formula_terms(
    task: Task, weight_specs: Mapping, mesh: MeshConfig, rows: int, tokens_per_row: int
) -> tuple[Shape, Layout]:
    """Returns a task and a mesh as the formulas know them.

    An axis that splits rows is "data" if most weights are split over it too, "replica" if they are
    not; another one that splits most weights is "mdl". One that splits nothing counts as not there.
    Weights count with their padding. Of a model's sizes only the weights are known: the dim that
    most of them share is the model's, and 12 of its squares are a layer.
    """
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    decided = decide_shardings(weight_specs, task.weight_sharding, sizes).weight_specs
    split, dims, parameters = Counter(), Counter(), 0
    for path, weight in spec_items(decided["params"]):
        spec = weight.partition_spec(tuple(sizes), "/".join(path))
        number = math.prod(padded_shape(weight.shape, spec, sizes))
        parameters += number
        split.update({axis: number for entry in spec for axis in axes_of(entry)})
        dims.update(weight.shape[-2:] if len(weight.shape) > 1 else ())
    mapping = task.inputs_split_mapping
    of_rows = set(sizes) if mapping is None else {
        axis for entry in mapping.values() for axis in axes_of(entry[0])
    }
    of_weights = {axis for axis, number in split.items() if 2 * number >= parameters}
    model_dims = max(dims, key=lambda dim: (dims[dim], dim), default=1)

    def along(axes: set[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    mdl = along(of_weights - of_rows)
    layout = Layout(
        replica=along(of_rows - of_weights), data=along(of_rows & of_weights), mdl=mdl,
        mdl_splits="features" if mdl > 1 else "rows",
        gathers_weights=along(of_rows & of_weights) > 1,
        micro_batches=task.learner.gradient_accumulation_steps,
    )
    return Shape(
        parameters=parameters, num_layers=max(1, round(parameters / (12 * model_dims**2))),
        model_dims=model_dims, hidden_dims=4 * model_dims,
        vocab_size=max(task.num_ids().values(), default=0), slots=_SLOTS, rows=rows,
        tokens_per_row=tokens_per_row,
    ), layout
