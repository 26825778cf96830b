"""A task on a mesh, its steps in float64: from NumPy states to NumPy states."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.models.model import MdlVars
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout, TrainState
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, abstract_global_batch, batch_spec
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.core.task import Task
from praxis_lite.core.xla_workarounds.mended_products import MendedFunction
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.experiment.experiment import Job
from praxis_tools.check.certificate import mesh_name
from praxis_tools.check.runs.float64 import in_float64, wide_dtype, wide_structs

PyTree = Any
Batch = Mapping[str, np.ndarray]
Leaves = dict[str, np.ndarray]
PADDING_VALUE = 3.0  # Of the padding of a step's inputs, which must change no result.


class TaskRunner:
    """A task on a mesh, with the compiled steps that a check needs.

    Args:
      partitioner: of the task on the mesh.
    """

    def __init__(self, partitioner: Partitioner):
        self.partitioner = partitioner
        self.layout, self.mesh = partitioner.layout, partitioner.mesh
        self.name = mesh_name(self.mesh.shape)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def stored(self, state: TrainState) -> TrainState:
        """Returns a NumPy state of true shapes in its own types, padded by zeros, on the mesh."""
        placed = _padded(state, self.layout.abstract(self.mesh), 0.0)
        # Copies of JAX's own: views of NumPy's buffers would not be donated.
        return jax.tree.map(lambda x: x.copy(), placed)

    def init(self, seed: int) -> TrainState:
        """Returns the initial state as the partitioner makes it, padded, on the mesh."""
        return self.partitioner.init(self.partitioner.key(seed))

    def train(
        self, state: TrainState, batches: Sequence[Batch], seed: int, *,
        without_randomness: bool = False,
    ) -> tuple[list[Leaves], TrainState, dict[str, float]]:
        """Returns the reports of each step, the last state, and the largest padding of its leaves.

        Args:
          state: NumPy arrays of true shapes, in float64.
          batches: a step for each.

        Returns:
          By step: "metrics/NAME/value", "metrics/NAME/weight", "learner/NAME", "gradients/PATH".
        """
        placed, reports, key = self._placed(self.layout, state), [], self.partitioner.key(seed)
        for inputs in batches:
            batch = self.batch(inputs)
            step = self._program(
                self.partitioner.train_step, inputs, without_randomness=without_randomness
            )
            with jax.enable_x64(True):
                placed, outputs = step(placed, batch, key)
            reports.append(report(jax.device_get(outputs)))
        return reports, *cut(self.layout, jax.device_get(placed))

    def evaluate(
        self, mdl_vars: MdlVars, inputs: Batch, *, without_randomness: bool = False
    ) -> Leaves:
        """Returns the metrics and outputs of each real row of a batch, as `train` names them."""
        step = self.partitioner.eval_examples
        metrics, examples, is_real = self._of_vars(step, mdl_vars, inputs, without_randomness)
        return report({"metrics": metrics}) | {
            f"examples/{name}": x[np.asarray(is_real)] for name, x in examples.items()
        }

    def decode(
        self, mdl_vars: MdlVars, inputs: Batch, *, without_randomness: bool = False
    ) -> Leaves:
        """Returns the arrays that the task decodes of a batch."""
        with jax.enable_x64(True):
            mdl_vars = self.partitioner.decoding_weights.form_of(mdl_vars)
        step = self.partitioner.decode_step
        return leaves_of(self._of_vars(step, mdl_vars, inputs, without_randomness))

    def _of_vars(
        self, step: Step, mdl_vars: MdlVars, inputs: Batch, without_randomness: bool
    ) -> PyTree:
        key = self.partitioner.batch_key(0, 0, 0)
        run = self._program(step, inputs, without_randomness=without_randomness)
        with jax.enable_x64(True):
            return jax.device_get(run(self._placed(step.layout, mdl_vars), self.batch(inputs), key))

    def call(
        self, function: Callable[..., Any], mdl_vars: MdlVars, inputs: Batch
    ) -> Leaves:
        """Returns `function(mdl_vars, inputs)` of unpadded arrays, run on the mesh in float64."""
        layout = self.layout.select("mdl_vars")
        batch, given = self.batch(inputs), self._placed(layout, mdl_vars)
        wide = in_float64(
            self.partitioner.with_mdl_vars(function), layout.abstract(self.mesh),
            abstract_global_batch(structs(inputs), self.mesh),
        )
        run = self._jitted(wide, self.partitioner.replicated)
        with jax.enable_x64(True):
            return leaves_of(jax.device_get(run(given, batch)))

    def by_layer(self, state: TrainState, inputs: Batch, seed: int) -> Leaves:
        """Returns the values that `in_float64(by_layer=True)` records of a training step."""
        run = self._program(self.partitioner.train_step, inputs, by_layer=True)
        key = self.partitioner.key(seed)
        with jax.enable_x64(True):
            _, seen = run(self._placed(self.layout, state), self.batch(inputs), key)
            return {name: np.asarray(x) for name, x in seen.items()}

    def traced(self, step: Step, inputs: Batch, **settings: Any) -> Callable[..., Any]:
        """Returns a step of the partitioner in float64, before it is compiled."""
        return in_float64(step.function, *step.abstract(inputs), **settings)

    def batch(self, inputs: Batch) -> GlobalBatch:
        """Returns a batch in float64; the rows that fill it up are copies of the last row."""
        num_rows = len(next(x for x in inputs.values() if x.ndim))
        missing = -num_rows % self.mesh.size

        def place(x: np.ndarray) -> jax.Array:
            x = x.astype(wide_dtype(x.dtype))
            if x.ndim:
                x = np.concatenate([x, *[x[-1:]] * missing])
            spec = batch_spec(x.ndim, self.mesh.axis_names)
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        with jax.enable_x64(True):
            return GlobalBatch({name: place(x) for name, x in inputs.items()}, num_rows)

    def _program(self, step: Step, inputs: Batch, **settings: Any) -> Callable[..., Any]:
        shapes = tuple((name, x.shape) for name, x in inputs.items())
        key = (step, shapes, *settings.items())
        if key not in self._programs:
            out = self.partitioner.replicated
            if settings.get("by_layer"):
                out = None
            elif step.trains:
                out = self.layout.shardings(self.mesh), out
            self._programs[key] = self._jitted(self.traced(step, inputs, **settings), out)
        return self._programs[key]

    def _jitted(self, function: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
        jitted = jax.jit(
            without_xla_errors(function), out_shardings=out_shardings,
            compiler_options=_options(self.mesh),
        )
        return MendedFunction(jitted, self.mesh)

    def _placed(self, layout: StateLayout, tree: PyTree) -> PyTree:
        """Returns NumPy arrays of true shapes, padded by PADDING_VALUE, on the mesh."""
        with jax.enable_x64(True):
            return _padded(tree, wide_structs(layout.abstract(self.mesh)), PADDING_VALUE)


def _padded(tree: PyTree, like: PyTree, padding: float) -> PyTree:
    def place(x: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, like.sharding)
        padded = np.full(like.shape, padding, like.dtype)
        padded[tuple(map(slice, np.shape(x)))] = x
        return jax.device_put(padded, like.sharding)

    return jax.tree.map(place, tree, like)


def _options(mesh: Mesh) -> dict[str, int] | None:
    """Returns options under which CPU programs, which run a few times, compile a third faster."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if is_cpu else None


def structs(batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def cut(layout: StateLayout, tree: PyTree) -> tuple[PyTree, dict[str, float]]:
    """Returns padded NumPy arrays cut to true shapes, and by path the largest number cut off.

    Only what has padding is among the latter.
    """
    padding = {}

    def one(path: tuple, x: Any, true: jax.ShapeDtypeStruct) -> Any:
        if x.shape == true.shape:
            return x
        x = np.array(x)
        inside = tuple(map(slice, true.shape))
        kept = x[inside].copy()
        x[inside] = 0
        padding[path_of(path)] = float(np.max(np.abs(x.astype(np.float64)), initial=0.0))
        return kept

    return jax.tree.map_with_path(one, tree, layout.shapes), padding


def on_mesh(
    job: Job, task: Task, shape: Sequence[int], build: Any = None,
    axis_types: str | Sequence[str] | None = None,
) -> TaskRunner:
    """Returns `task` on a mesh of the job's axes.

    Args:
      axis_types: of the axes; None: the job's own.
      build: of a partitioner, called with the task and the mesh; None: the job's own.
    """
    config = MeshConfig(
        ici_mesh_shape=tuple(shape), axis_names=tuple(job.mesh.axis_names),
        allow_unused_devices=True, axis_types=axis_types or job.mesh.axis_types,
    )
    return TaskRunner((build or job.partitioner or Partitioner)(task, make_mesh(config)))


def reporting(task: Task, num_micro_batches: int | None = None) -> Task:
    """Returns a task whose learner also reports the gradients, as they come in.

    Args:
      num_micro_batches: in place of the learner's own; None: its own.
    """
    task, learner = copy.copy(task), copy.copy(task.learner)
    bind = task.learner.bind
    learner.bind = lambda *weights: _Reporting(**vars(bind(*weights)) | {"learner": learner})
    if num_micro_batches is not None:
        learner.gradient_accumulation_steps = num_micro_batches
    task.learner = learner
    return task


class _Reporting(BoundLearner):
    def update(self, grads: PyTree, *args: Any) -> tuple:
        params, opt_states, scalars, is_skipped = super().update(grads, *args)
        gradients = self._to_device({"params": grads})["params"]
        return params, opt_states, {**scalars, "gradients": gradients}, is_skipped


def leaves_of(tree: PyTree, prefix: str = "") -> Leaves:
    """Returns the arrays of a tree by their paths; a key as its bits."""
    result = {}
    for name, x in zip(names_of(tree), jax.tree.leaves(tree), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        result[prefix + name] = np.asarray(x)
    return result


def names_of(tree: PyTree) -> list[str]:
    """Returns the paths of a tree's leaves, whatever these are."""
    return [path for path, _ in leaves_with_path(tree)]


def report(outputs: Mapping[str, Any]) -> Leaves:
    """Returns the report of a step, in the names of `TaskRunner.train`."""
    result = {}
    for name, (value, weight) in outputs["metrics"].items():
        result[f"metrics/{name}/value"] = np.asarray(value)
        result[f"metrics/{name}/weight"] = np.asarray(weight)
    scalars = dict(outputs.get("learner", {}))
    gradients = scalars.pop("gradients", {})
    result |= {f"learner/{name}": np.asarray(x) for name, x in scalars.items()}
    return result | leaves_of(gradients, "gradients/")
