"""Partitioner: compiles a task's sharded init, train, eval and decode steps for a mesh."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import format_bytes
from praxis_lite.core.partitioner import arguments, steps
from praxis_lite.core.partitioner.compiled_steps import Step, StepOfState, StepOfWeights, TrainStep
from praxis_lite.core.partitioner.compiler_options import (
    ACCUMULATING,
    DECODING,
    init_options,
    more_options,
    step_options,
)
from praxis_lite.core.partitioner.decoding_weights import DecodingWeights
from praxis_lite.core.partitioner.gradient_strategy import GradientFunctions, GradientStrategy
from praxis_lite.core.partitioner.task_on_mesh import TaskOnMesh
from praxis_lite.core.partitioner.train_state import TrainState, layout_and_learner
from praxis_lite.core.sharding.batch_sharding import (
    GlobalBatch,
    global_batch,
    is_true_row,
    process_rows,
    replicated_key,
)
from praxis_lite.core.sharding.devices.axis_types import explicit_axes_of, with_auto_axes
from praxis_lite.core.sharding.mesh_config import CompilerOptions
from praxis_lite.core.sharding.padding import evenly
from praxis_lite.core.task import Task
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors

PyTree = Any


class Partitioner:
    """Compiles a task's steps for a mesh; the mesh's devices need not be attached.

    Steps are `Step` objects, which can be called, or traced and lowered for the shapes of a batch.

    Args:
      task: The task, written as if for a single device.
      mesh: The mesh. Its Explicit axes become part of array types inside train and eval steps. The
        state is stored on a mesh with the same devices and Auto axes.
      gradients: Strategy for computing gradients and metrics, such as
        `praxis_lite.core.collectives.ExplicitCollectives`. If None, XLA partitions the
        single-device computation.
      compiler_options: See `MeshConfig`.

    Attributes:
      mesh: Mesh of the state's arrays, with Auto axes.
      layout: StateLayout of the TrainState.
      bound_learner: The task's learner, bound to its weights.
      gradients: The strategy's functions for gradients and metrics.
      init: (key) -> TrainState. Arrays are created sharded.
      compiler_options: Compiler options for the steps on this mesh, or None.
      train_options: Compiler options for the train step, including those for microbatches.

    Raises:
      ConfigError: A weight's sharding does not fit its shape or the mesh, or XLA rejects a compiler
        option. Raised before any step is compiled.
    """

    def __init__(
        self,
        task: Task,
        mesh: Mesh,
        *,
        gradients: GradientStrategy | None = None,
        compiler_options: CompilerOptions | None = None,
    ):
        # Arrays are stored on a mesh of Auto axes. Axes are Explicit only while a step is traced.
        explicit_axes, mesh = explicit_axes_of(mesh), with_auto_axes(mesh)
        self.task, self.mesh = task, mesh
        self._num_ids = dict(task.num_ids())
        self.task_on_mesh = TaskOnMesh(task, mesh, explicit_axes)
        # Declaring Linen weights runs the module, which may use the mesh.
        with self.task_on_mesh.tracing():
            self.layout, self.bound_learner = layout_and_learner(task, dict(mesh.shape))
        self._mdl_layout = self.layout.select("mdl_vars")
        self.gradient_functions = (gradients or GradientFunctions()).on(
            task, mesh, self._mdl_layout, self.bound_learner.groups
        )
        self.replicated = self.task_on_mesh.replicated
        self.compiler_options = step_options(compiler_options, mesh)
        self.train_options = self.compiler_options
        if task.learner.gradient_accumulation_steps > 1 or self.gradient_functions.sums_in_a_loop:
            self.train_options = more_options(ACCUMULATING, self.compiler_options, mesh)
        out_shardings = self.layout.shardings(mesh)
        self.init = jax.jit(
            self._init, compiler_options=init_options(mesh), out_shardings=out_shardings
        )
        self._eval_params = jax.jit(
            self._eval_params_of_state,
            static_argnames="use_ema",
            out_shardings=self._mdl_layout.shardings(mesh)["params"],
        )

    def __repr__(self) -> str:
        weights = list(self._mdl_layout.leaves())
        num_parameters = sum(math.prod(weight.shape) for weight in weights)
        per_device = sum(weight.bytes_per_device for weight in weights)
        return (
            f"Partitioner({self.task!r}, mesh {dict(self.mesh.shape)}; {num_parameters:,} "
            f"parameters, {format_bytes(per_device)} on each device)"
        )

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """The step (state, GlobalBatch, key) -> (state, outputs); it donates its input state."""
        return TrainStep(
            self.task_on_mesh,
            self.layout,
            functools.partial(steps.train_step, self.task, **self._gradient_arguments),
            required_inputs=self.task.required_inputs,
            check_rows=self._check_training_rows,
            compiler_options=self.train_options,
        )

    @functools.cached_property
    def histogram_step(self) -> StepOfState:
        """The step (state, GlobalBatch, key) -> histograms of weights and gradients by name.

        The result is that of `steps.histogram_step`, replicated.
        """
        return StepOfState(
            "histogram_step",
            "A step that computes histograms",
            self.task_on_mesh,
            self.layout,
            functools.partial(steps.histogram_step, self.task, **self._gradient_arguments),
            required_inputs=self.task.required_inputs,
            may_lack_key=False,
            check_rows=self._check_training_rows,
            compiler_options=self.train_options,
        )

    @property
    def _gradient_arguments(self) -> dict[str, Any]:
        return {
            "bound_learner": self.bound_learner,
            "value_and_grad": self.gradient_functions.value_and_grad,
            "wrap_host_weights": self._mdl_layout.wrap_host_weights,
        }

    def _check_training_rows(self, element_spec: PyTree) -> None:
        self.gradient_functions.check_rows(
            element_spec, accumulation_steps=self.task.learner.gradient_accumulation_steps
        )

    @functools.cached_property
    def eval_step(self) -> StepOfWeights:
        """The step (mdl_vars, GlobalBatch, key) -> metrics; the key is optional."""
        return self._eval_step("eval_step", lambda metrics, examples, inputs: metrics)

    @functools.cached_property
    def eval_examples(self) -> StepOfWeights:
        """Like `eval_step`, but returns (metrics, outputs, is_real).

        `outputs` maps names to arrays [B, ...]. `is_real`, bool [B], is False for padding rows.
        """
        return self._eval_step(
            "eval_examples",
            lambda metrics, examples, inputs: (metrics, examples, is_true_row(inputs)),
        )

    def _eval_step(self, name: str, results: Callable[..., Any]) -> StepOfWeights:
        def pure(mdl_vars: PyTree, inputs: PyTree, key: jax.Array | None) -> Any:
            return results(
                *self.gradient_functions.evaluate(self.task, mdl_vars, inputs, key), inputs
            )

        return StepOfWeights(
            name,
            "An evaluation step",
            self.task_on_mesh,
            self._mdl_layout,
            pure,
            required_inputs=self.task.required_inputs,
            may_lack_key=True,
            check_rows=functools.partial(self.gradient_functions.check_rows, accumulation_steps=1),
            compiler_options=self.compiler_options,
        )

    @functools.cached_property
    def decode_options(self) -> dict[str, Any] | None:
        """Compiler options for decoding."""
        return more_options(DECODING, self.compiler_options, self.mesh)

    @functools.cached_property
    def decoding_weights(self) -> DecodingWeights:
        """The converter from training weights to the decoding format."""
        specs, stored = self.task.model.weight_specs(), self.task.stored_for_decoding()
        return DecodingWeights(self._mdl_layout, specs, self.mesh, stored)

    @functools.cached_property
    def decode_step(self) -> StepOfWeights:
        """The step (mdl_vars, GlobalBatch, key) -> outputs, with one row per example.

        The weights are converted in each call, unless `for_decoding` has already converted them.
        """
        return StepOfWeights(
            "decode_step",
            "A decoding step",
            self.task_on_mesh,
            self.decoding_weights.layout,
            functools.partial(steps.decode_step, self.task),
            required_inputs=self.task.required_decode_inputs,
            may_lack_key=False,
            check_rows=lambda element_spec: None,
            compiler_options=self.decode_options,
            is_typed=False,  # JAX cannot type a cache that is written at a different index per row.
            to_layout=lambda mdl_vars: self.decoding_weights.convert(
                mdl_vars, "decode_step: mdl_vars"
            ),
        )

    def for_decoding(self, mdl_vars: PyTree, *, donates: bool = False) -> PyTree:
        """Converts weights to the decoding format.

        Layers are unstacked, and the task may store weights in another format (see
        `Task.stored_for_decoding`).

        Pass the result to `decode_step` or to functions wrapped by `with_mdl_vars`.

        Args:
          mdl_vars: Weights from a state.
          donates: Whether to delete each weight after its conversion. Otherwise both copies stay in
            memory.

        Raises:
          ConfigError: `mdl_vars` are not this Partitioner's weights.
        """
        name = "for_decoding: mdl_vars"
        return self.decoding_weights.convert(mdl_vars, name, donates=donates)

    @property
    def steps(self) -> dict[str, Step]:
        """The steps, keyed by name: "train", "eval", "eval_examples" and "decode"."""
        steps = (self.train_step, self.eval_step, self.eval_examples, self.decode_step)
        return {step.kind: step for step in steps}

    def key(self, seed: int) -> jax.Array:
        """Returns the key for a run, replicated over the mesh."""
        return replicated_key(jax.random.key(seed), self.mesh)

    def batch_key(self, seed: int, step: int, batch: int) -> jax.Array:
        """Returns the key for evaluating or decoding a batch, replicated over the mesh.

        Args:
          seed: Seed of the run.
          step: Step of the weights.
          batch: Index of the batch in its dataset.
        """
        # `fold_in` would silently round a float; `operator.index` rejects it.
        key = jax.random.fold_in(jax.random.key(seed), operator.index(step))
        key = jax.random.fold_in(key, operator.index(batch))
        return replicated_key(key, self.mesh)

    def global_batch(self, inputs: PyTree, num_rows: int | None = None) -> GlobalBatch:
        """Places NumPy arrays on the mesh as global arrays; see `batch_sharding.global_batch`.

        In every process, pass either the complete batch, or `num_rows` and the rows from
        `process_rows`.

        Raises:
          ConfigError: A leaf is not an array or contains an id that is out of the model's range, or
            the leaves have different numbers of rows.
        """
        arguments.check_host_batch(inputs, "global_batch", self._num_ids)
        return global_batch(inputs, self.mesh, num_rows)

    def process_rows(self, num_rows: int) -> slice:
        """Returns the rows of a global batch that this process feeds to its devices."""
        return process_rows(num_rows, self.mesh)

    def eval_mdl_vars(self, state: TrainState, *, use_ema: bool) -> PyTree:
        """Returns the weights from a state, or their averages, for evaluation and decoding.

        Args:
          state: A TrainState. Only the `opt_states` in `Learner.eval_opt_states` are read.
          use_ema: Whether to return the learner's moving averages.

        Raises:
          ConfigError: `use_ema` is set, but the learner has no moving averages.
        """
        arguments.check_type(self.layout, state, "eval_mdl_vars: state")
        names = self.task.learner.eval_opt_states(self.layout.shapes.opt_states, use_ema=use_ema)
        if not names:
            return state.mdl_vars
        read = {name: state.opt_states[name] for name in names}
        params = self._eval_params(state.mdl_vars["params"], read, use_ema=use_ema)
        return {**state.mdl_vars, "params": params}

    def with_mdl_vars(
        self,
        function: Callable[..., Any],
        static_argnums: int | Sequence[int] = (),
        *,
        has_splits: bool = False,
    ) -> Callable[..., Any]:
        """Wraps a function of unpadded weights so that it takes padded mdl_vars.

        Use this for computations other than the steps of this class, and compile the result with
        `jax.jit` and the same `static_argnums`. The wrapped function also accepts weights converted
        by `for_decoding`. It replaces each GlobalBatch argument with its inputs before calling
        `function`. XLA chooses the sharding of other arguments and of the results; see
        `padding.evenly`.

        Args:
          function: Takes unpadded weights and `args`.
          static_argnums: Same as for `jax.jit`.
          has_splits: Whether arguments and results already have shardings, which are then kept.

        Raises:
          ConfigError: `mdl_vars` are not this Partitioner's weights.
        """
        lay_out: Callable[[PyTree], PyTree] = (lambda tree: tree) if has_splits else evenly

        def on_the_mesh(mdl_vars: PyTree, *args: Any) -> Any:
            # Weights may have the training format or the decoding format.
            layout = self._mdl_layout
            if not layout.is_of(mdl_vars) and self.decoding_weights.layout.is_of(mdl_vars):
                layout = self.decoding_weights.layout
            arguments.check_tree(layout, mdl_vars, "with_mdl_vars: mdl_vars")
            with self.task_on_mesh.tracing():
                args = tuple(
                    self.task_on_mesh.unpadded_inputs(x)
                    if isinstance(x, GlobalBatch)
                    else lay_out(x)
                    for x in args
                )
                return lay_out(function(layout.unpad(mdl_vars), *args))

        return without_xla_errors(on_the_mesh, static_argnums)

    def _init(self, key: jax.Array) -> TrainState:
        arguments.check_key(key, "init: key")
        with self.task_on_mesh.tracing():
            state = steps.init_state(self.task, key, self.bound_learner)
            padded: TrainState = self.layout.pad(state)
            return padded

    def _eval_params_of_state(self, params: PyTree, opt_states: PyTree, *, use_ema: bool) -> PyTree:
        with self.task_on_mesh.tracing():
            layout = self._mdl_layout.select("params")
            opt_layout = self.layout.select("opt_states")
            opt_states = {name: opt_layout.select(name).unpad(x) for name, x in opt_states.items()}
            params = self.bound_learner.eval_params(
                layout.unpad(params), opt_states, use_ema=use_ema
            )
            return layout.pad(params)
