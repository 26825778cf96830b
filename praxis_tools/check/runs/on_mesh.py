"""Runs the steps of a task on a mesh in float64. States are passed as NumPy arrays."""

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
from praxis_lite.core.xla_workarounds.patched_matmuls import PatchedFunction
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.experiment.experiment import Job
from praxis_tools.check.certificate import mesh_name
from praxis_tools.check.runs.float64 import (
    Float64Function,
    in_float64,
    wide_dtype,
    wide_structs,
)

PyTree = Any
Batch = Mapping[str, np.ndarray]
Leaves = dict[str, np.ndarray]
# Padding value in a step's inputs. It is nonzero, so that results change if padding is read.
PADDING_VALUE = 3.0


class TaskRunner:
    """Compiles and runs the steps of a task on a mesh.

    Args:
      partitioner: The task's partitioner on the mesh.
    """

    def __init__(self, partitioner: Partitioner):
        self.partitioner = partitioner
        self.layout, self.mesh = partitioner.layout, partitioner.mesh
        self.name = mesh_name(self.mesh.shape)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def place_state(self, state: TrainState) -> TrainState:
        """Places an unpadded NumPy state on the mesh in the task's dtypes, padded with zeros."""
        placed = _pad_and_place(state, self.layout.abstract(self.mesh), 0.0)
        # Copy, because JAX cannot donate views of NumPy buffers.
        return jax.tree.map(lambda x: x.copy(), placed)

    def init(self, seed: int) -> TrainState:
        """Returns the partitioner's initial state, padded and placed on the mesh."""
        return self.partitioner.init(self.partitioner.key(seed))

    def train(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        seed: int,
        *,
        without_randomness: bool = False,
    ) -> tuple[list[Leaves], TrainState, dict[str, float]]:
        """Trains one step on each batch.

        Args:
          state: Unpadded NumPy state in float64.
          batches: Batches to train on.
          seed: Seed of the random key.
          without_randomness: Whether to set all random bits to 0.

        Returns:
          (reports, state, padding): `reports` contains a dict for each step, with the keys
          "metrics/NAME/value", "metrics/NAME/weight", "learner/NAME" and "gradients/PATH". `state`
          is the last state as unpadded NumPy arrays. `padding` maps the path of each padded leaf to
          the largest absolute value in its padding.
        """
        placed, reports, key = self._place(self.layout, state), [], self.partitioner.key(seed)
        for inputs in batches:
            batch = self.batch(inputs)
            step = self._program(
                self.partitioner.train_step, inputs, without_randomness=without_randomness
            )
            with jax.enable_x64(True):
                placed, outputs = step(placed, batch, key)
            reports.append(report(jax.device_get(outputs)))
        return reports, *unpad(self.layout, jax.device_get(placed))

    def evaluate(
        self, mdl_vars: MdlVars, inputs: Batch, *, without_randomness: bool = False
    ) -> Leaves:
        """Evaluates a batch and returns its metrics and the outputs of real rows.

        Metrics have the same keys as in `train`, and outputs have the keys "examples/NAME".
        """
        step = self.partitioner.eval_examples
        metrics, examples, is_real = self._run_on_weights(
            step, mdl_vars, inputs, without_randomness
        )
        return report({"metrics": metrics}) | {
            f"examples/{name}": x[np.asarray(is_real)] for name, x in examples.items()
        }

    def decode(
        self, mdl_vars: MdlVars, inputs: Batch, *, without_randomness: bool = False
    ) -> Leaves:
        """Decodes a batch of prompts and returns the decoded arrays."""
        with jax.enable_x64(True):
            mdl_vars = self.partitioner.decoding_weights.convert_arrays(mdl_vars)
        step = self.partitioner.decode_step
        return leaves_of(self._run_on_weights(step, mdl_vars, inputs, without_randomness))

    def _run_on_weights(
        self, step: Step, mdl_vars: MdlVars, inputs: Batch, without_randomness: bool
    ) -> PyTree:
        key = self.partitioner.batch_key(0, 0, 0)
        run = self._program(step, inputs, without_randomness=without_randomness)
        with jax.enable_x64(True):
            mdl_vars = self._place(step.layout, mdl_vars)
            return jax.device_get(run(mdl_vars, self.batch(inputs), key))

    def call(self, function: Callable[..., Any], mdl_vars: MdlVars, inputs: Batch) -> Leaves:
        """Runs `function(mdl_vars, inputs)` on the mesh in float64, with unpadded arguments."""
        layout = self.layout.select("mdl_vars")
        batch, placed = self.batch(inputs), self._place(layout, mdl_vars)
        wide = in_float64(
            self.partitioner.with_mdl_vars(function),
            layout.abstract(self.mesh),
            abstract_global_batch(structs(inputs), self.mesh),
        )
        run = self._jitted(wide, self.partitioner.replicated)
        with jax.enable_x64(True):
            return leaves_of(jax.device_get(run(placed, batch)))

    def by_layer(self, state: TrainState, inputs: Batch, seed: int) -> Leaves:
        """Returns the values recorded by `in_float64(by_layer=True)` in a training step."""
        run = self._program(self.partitioner.train_step, inputs, by_layer=True)
        key = self.partitioner.key(seed)
        with jax.enable_x64(True):
            _, records = run(self._place(self.layout, state), self.batch(inputs), key)
            return {name: np.asarray(x) for name, x in records.items()}

    def traced(self, step: Step, inputs: Batch, **settings: Any) -> Float64Function:
        """Returns one of the partitioner's steps, converted to float64 but not compiled."""
        return in_float64(step.function, *step.abstract(inputs), **settings)

    def batch(self, inputs: Batch) -> GlobalBatch:
        """Places a batch on the mesh in float64, padded with copies of the last row."""
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
            out: Any = self.partitioner.replicated
            if settings.get("by_layer"):
                out = None
            elif step.trains:
                out = self.layout.shardings(self.mesh), out
            self._programs[key] = self._jitted(self.traced(step, inputs, **settings), out)
        return self._programs[key]

    def _jitted(self, function: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
        jitted = jax.jit(
            without_xla_errors(function),
            out_shardings=out_shardings,
            compiler_options=_compiler_options(self.mesh),
        )
        return PatchedFunction(jitted, self.mesh)

    def _place(self, layout: StateLayout, tree: PyTree) -> PyTree:
        """Places unpadded NumPy arrays on the mesh in float64, padded with PADDING_VALUE."""
        with jax.enable_x64(True):
            abstract = wide_structs(layout.abstract(self.mesh))
            return _pad_and_place(tree, abstract, PADDING_VALUE)


def _pad_and_place(tree: PyTree, structs: PyTree, padding: float) -> PyTree:
    def place(x: np.ndarray, struct: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, struct.sharding)
        padded = np.full(struct.shape, padding, struct.dtype)
        padded[tuple(map(slice, np.shape(x)))] = x
        return jax.device_put(padded, struct.sharding)

    return jax.tree.map(place, tree, structs)


def _compiler_options(mesh: Mesh) -> dict[str, int] | None:
    """Returns compiler options that reduce the compile time on CPU by a third."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if is_cpu else None


def structs(batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array in a batch."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def unpad(layout: StateLayout, tree: PyTree) -> tuple[PyTree, dict[str, float]]:
    """Removes the padding from NumPy arrays.

    Args:
      layout: Layout of the tree.
      tree: Padded NumPy arrays.

    Returns:
      (unpadded tree, dict that maps the path of each padded leaf to the largest absolute value in
      its padding).
    """
    padding = {}

    def unpad_leaf(path: tuple, x: Any, logical: jax.ShapeDtypeStruct) -> Any:
        if x.shape == logical.shape:
            return x
        x = np.array(x)
        inside = tuple(map(slice, logical.shape))
        unpadded = x[inside].copy()
        x[inside] = 0
        padding[path_of(path)] = float(np.max(np.abs(x.astype(np.float64)), initial=0.0))
        return unpadded

    return jax.tree.map_with_path(unpad_leaf, tree, layout.shapes), padding


def on_mesh(
    job: Job,
    task: Task,
    shape: Sequence[int],
    build: Any = None,
    axis_types: str | Sequence[str] | None = None,
) -> TaskRunner:
    """Returns a runner for a task on a mesh with the job's axes.

    Args:
      job: Job that determines the axes of the mesh.
      task: Task to run.
      shape: Number of devices along each axis.
      build: Function that takes (task, mesh) and returns a partitioner, or None to build the job's
        partitioner.
      axis_types: Types of the mesh axes, or None for the job's types.
    """
    config = MeshConfig(
        ici_mesh_shape=tuple(shape),
        axis_names=tuple(job.mesh.axis_names),
        allow_unused_devices=True,
        axis_types=axis_types or job.mesh.axis_types,
    )
    return TaskRunner((build or job.partitioner or Partitioner)(task, make_mesh(config)))


def with_reported_gradients(task: Task, accumulation_steps: int | None = None) -> Task:
    """Returns a task whose learner also reports the gradients before clipping.

    Args:
      task: The task.
      accumulation_steps: Number of gradient accumulation steps, or None for the learner's number.
    """
    task, learner = copy.copy(task), copy.copy(task.learner)
    bind = task.learner.bind

    def bind_reporting(
        weight_specs: PyTree, axis_sizes: Mapping[str, int] | None = None
    ) -> BoundLearner:
        bound_learner = bind(weight_specs, axis_sizes)
        return _ReportingLearner(**vars(bound_learner) | {"settings": learner})

    # Patch the copy, because the learner may be an instance of any subclass.
    learner.bind = bind_reporting  # type: ignore[method-assign]
    if accumulation_steps is not None:
        learner.gradient_accumulation_steps = accumulation_steps
    task.learner = learner
    return task


class _ReportingLearner(BoundLearner):
    """A learner that adds the gradients to its reported scalars."""

    def update(self, grads: PyTree, *args: Any) -> tuple:
        params, opt_states, scalars, is_skipped = super().update(grads, *args)
        gradients = self._to_device({"params": grads})["params"]
        return params, opt_states, {**scalars, "gradients": gradients}, is_skipped


def leaves_of(tree: PyTree, prefix: str = "") -> Leaves:
    """Maps paths to the arrays in a tree, converting random keys to their data."""
    leaves = {}
    for name, x in zip(names_of(tree), jax.tree.leaves(tree), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        leaves[prefix + name] = np.asarray(x)
    return leaves


def names_of(tree: PyTree) -> list[str]:
    """Returns the paths of a tree's leaves."""
    return [path for path, _ in leaves_with_path(tree)]


def report(outputs: Mapping[str, Any]) -> Leaves:
    """Returns the report of a step, with the keys documented in `TaskRunner.train`."""
    leaves = {}
    for name, (value, weight) in outputs["metrics"].items():
        leaves[f"metrics/{name}/value"] = np.asarray(value)
        leaves[f"metrics/{name}/weight"] = np.asarray(weight)
    scalars = dict(outputs.get("learner", {}))
    gradients = scalars.pop("gradients", {})
    leaves |= {f"learner/{name}": np.asarray(x) for name, x in scalars.items()}
    return leaves | leaves_of(gradients, "gradients/")
