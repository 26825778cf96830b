"""Chooses a job's mesh for a given set of devices, using estimated step times."""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax

from praxis_lite.core.errors import ConfigError, OutOfMemory
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.core.sharding.padding import padded_shape
from praxis_lite.core.sharding.split_dims import to_partition_spec
from praxis_lite.core.sharding.weight_sharding import decide_shardings
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_lite.core.task import Task
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.checks.memory import bytes_of_a_device, check_fits
from praxis_lite.trainer.job_on_mesh import partitioner_on
from praxis_tools.plan.chips import CHIPS, Chip
from praxis_tools.plan.plan_text import seconds_text
from praxis_tools.plan.predict import num_units
from praxis_tools.plan.search.formulas import Layout, Shape, peak_bytes, step_seconds
from praxis_tools.plan.topology import attached_topology

_DEFAULT_CHIP = CHIPS["h100"]  # Used for accelerators that are not in `CHIPS`.
_TIME_TOLERANCE = 0.01  # Step times that differ by less than this fraction are considered equal.
_NUM_SLOTS = 2  # The formulas assume Adam: two elements per weight.


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A candidate mesh, with estimates for a train step.

    Attributes:
      mesh: The candidate mesh.
      keeps_slices: Whether the mesh has as many slices as the set of devices.
      seconds: Estimated time of a train step.
      bytes: Estimated peak memory per device.
      distance: Distance to the experiment's mesh: the sum over all axes of |log(size / size in the
        experiment)|.
    """

    mesh: MeshConfig
    keeps_slices: bool
    seconds: float
    bytes: float
    distance: float


def choose_mesh(job: Job, devices: Sequence[jax.Device]) -> MeshConfig:
    """Chooses a mesh for these devices, with the same axis names as the job's mesh.

    Every factorization of the number of devices over the axes is a candidate. Candidates are valid
    if they are compatible with the task and the data, and if the state fits in memory. The fastest
    valid candidate is returned, or if several are equally fast, the candidate closest to the job's
    mesh. Step times are estimated by formulas, so nothing is compiled.

    Raises:
      ConfigError: No candidate is valid. If the state does not fit in memory on any candidate mesh,
        the message contains the number of devices needed.
    """
    topology = attached_topology(devices)
    chip = _DEFAULT_CHIP if topology is None else topology.chip
    candidates = _rank_candidates(job, devices, chip)
    validation_errors: list[ConfigError] = []
    too_large: list[tuple[int, MeshConfig, OutOfMemory]] = []
    # The candidates are sorted, so the first valid candidate is chosen.
    for candidate in candidates:
        try:
            partitioner = partitioner_on(job, make_mesh(candidate.mesh, devices))
            for name, pipeline in job.datasets.items():
                step = partitioner.train_step if name == TRAIN else partitioner.eval_step
                check_reads(step, checked_spec(pipeline, f"datasets.{name}"), f"datasets.{name}")
        except ConfigError as error:
            validation_errors.append(error)
            continue
        try:
            check_fits(partitioner.layout, partitioner.mesh, "train")
        except OutOfMemory as error:
            state_bytes = sum(leaf.bytes_per_device for leaf in partitioner.layout.leaves())
            too_large.append((state_bytes, candidate.mesh, error))
            continue
        _log.info(
            "mesh for %d devices: %s, chosen from %d; estimated %s per step on %s",
            len(devices),
            candidate.mesh.shape,
            len(candidates),
            seconds_text(candidate.seconds),
            chip.name,
        )
        if not candidate.keeps_slices:
            _log.info(
                "note: mesh.dcn_mesh_shape is now None, because the mesh axis is not divisible by "
                "the number of slices"
            )
        return candidate.mesh
    if not too_large:
        raise validation_errors[0]
    state_bytes, mesh, out_of_memory = min(too_large, key=lambda entry: entry[0])
    available = bytes_of_a_device(devices)
    num_needed = math.ceil(state_bytes * len(devices) / available)
    raise OutOfMemory(
        f"The state does not fit on {len(devices)} devices with any mesh ({len(candidates)} tried, "
        f"best: {mesh.shape}). At least {num_needed} such devices are needed; raise "
        f"--min_processes so that the job waits for them. {out_of_memory}"
    )


def _rank_candidates(job: Job, devices: Sequence[jax.Device], chip: Chip) -> list[_Candidate]:
    """Returns all candidates, best first."""
    spec = checked_spec(job.datasets[TRAIN], f"datasets.{TRAIN}")
    rows = num_rows_of(spec)
    num_slices = _num_slices(job.mesh, devices)
    specs = job.task.model.weight_specs()
    candidates = []
    for sizes in _factorizations(len(devices), len(job.mesh.axis_names)):
        mesh = _mesh(job.mesh, sizes, num_slices, is_torus=chip.torus_dims > 0)
        shape, layout = _formula_inputs(job.task, specs, mesh, rows, num_units(spec) // rows)
        candidates.append(
            _Candidate(
                mesh,
                math.prod(mesh.dcn_mesh_shape or (1,)) == num_slices,
                step_seconds(shape, layout, chip),
                peak_bytes(shape, layout),
                _distance(job.mesh, sizes),
            )
        )
    fastest = min(candidate.seconds for candidate in candidates)
    # For simulated devices, `check_fits` checks against the memory of the host instead.
    available = math.inf if chip.name == "cpu" else chip.hbm_bytes

    def rank(candidate: _Candidate) -> tuple:
        # Candidates with almost the same time are ranked by their distance from the job's mesh.
        slowdown = round(math.log(candidate.seconds / fastest) / _TIME_TOLERANCE)
        return (
            not candidate.keeps_slices,
            candidate.bytes > available,
            slowdown,
            round(candidate.distance, 6),
            candidate.mesh.shape,
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
    """Returns the number of slices to use in a mesh of these devices."""
    if math.prod(config.dcn_mesh_shape or (1,)) == 1:
        return 1
    slices = Counter(getattr(device, "slice_index", None) for device in devices)
    if len(slices) == 1:
        slices = Counter(device.process_index for device in devices)
    # Slices of different sizes cannot form a mesh.
    return len(slices) if len(set(slices.values())) == 1 else 1


def _mesh(
    config: MeshConfig, sizes: tuple[int, ...], num_slices: int, *, is_torus: bool
) -> MeshConfig:
    """Returns `config` with new axis sizes.

    The new mesh keeps slices on the same mesh axis (`dcn_mesh_shape`) if the new size of that axis
    is divisible by the number of slices.
    """
    shape, dcn, own_dcn = list(sizes), None, config.dcn_mesh_shape
    if num_slices > 1 and own_dcn is not None:
        axis = own_dcn.index(max(own_dcn))
        if sizes[axis] % num_slices == 0:
            shape[axis] //= num_slices
            dcn = tuple(num_slices if k == axis else 1 for k in range(len(sizes)))
    return dataclasses.replace(
        config,
        ici_mesh_shape=tuple(shape),
        dcn_mesh_shape=dcn,
        # After the loss of a host, the torus dims rarely match the axis sizes.
        allow_split_physical_axes=config.allow_split_physical_axes or is_torus,
    )


def _distance(config: MeshConfig, sizes: tuple[int, ...]) -> float:
    """Returns the sum of absolute log ratios between `sizes` and the axis sizes in `config`.

    A size of -1 is treated as 1.
    """
    config_sizes = [
        abs(size) * dcn
        for size, dcn in zip(
            config.ici_mesh_shape, config.dcn_mesh_shape or (1,) * len(sizes), strict=True
        )
    ]
    return sum(abs(math.log(size / other)) for size, other in zip(sizes, config_sizes, strict=True))


def _formula_inputs(
    task: Task, weight_specs: Mapping, mesh: MeshConfig, rows: int, tokens_per_row: int
) -> tuple[Shape, Layout]:
    """Converts a task and a mesh to the inputs of the formulas.

    An axis that splits rows is treated as "data" if it also splits most weights, and as "replica"
    otherwise. Any other axis that splits most weights is treated as "mdl". The model's sizes are
    guessed from the padded weights: model_dims is the most frequent dim, and a layer has
    12 * model_dims**2 weights.

    Args:
      task: Task to train.
      weight_specs: Shapes and specs of the model's weights.
      mesh: Candidate mesh.
      rows: Number of rows in a global batch.
      tokens_per_row: Number of tokens in each row.
    """
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    decided = decide_shardings(weight_specs, task.weight_sharding, sizes).weight_specs
    # The number of weights that each axis splits, and how often each dim occurs in a matrix.
    num_split: Counter[str] = Counter()
    num_weights_with_dim: Counter[int] = Counter()
    parameters = 0
    for path, weight in spec_items(decided["params"]):
        spec = weight.partition_spec(tuple(sizes), "/".join(path))
        size = math.prod(padded_shape(weight.shape, spec, sizes))
        parameters += size
        num_split.update({axis: size for entry in spec for axis in axes_of(entry)})
        num_weights_with_dim.update(weight.shape[-2:] if len(weight.shape) > 1 else ())
    # The axes that split the rows of a batch. Without a mapping, these are all axes.
    mapping = task.inputs_split_mapping
    row_axes = (
        set(sizes)
        if mapping is None
        else {
            axis
            for split_dims in mapping.values()
            if split_dims
            for axis in axes_of(to_partition_spec((split_dims[0],), mesh.axis_names)[0])
        }
    )
    weight_axes = {axis for axis, size in num_split.items() if 2 * size >= parameters}
    model_dims = max(
        num_weights_with_dim, key=lambda dim: (num_weights_with_dim[dim], dim), default=1
    )

    def num_devices(axes: set[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    data, mdl = num_devices(row_axes & weight_axes), num_devices(weight_axes - row_axes)
    layout = Layout(
        replica=num_devices(row_axes - weight_axes),
        data=data,
        mdl=mdl,
        mdl_splits="features" if mdl > 1 else "rows",
        gathers_weights=data > 1,
        accumulation_steps=task.learner.gradient_accumulation_steps,
    )
    return Shape(
        parameters=parameters,
        num_layers=max(1, round(parameters / (12 * model_dims**2))),
        model_dims=model_dims,
        hidden_dims=4 * model_dims,
        vocab_size=max(task.num_ids().values(), default=0),
        slots=_NUM_SLOTS,
        rows=rows,
        tokens_per_row=tokens_per_row,
    ), layout


_log = logging.getLogger(__name__)
