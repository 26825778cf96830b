"""A task on a mesh: sharded init, and compiled train, eval and decode steps. Nothing else."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.partitioner import arguments, steps
from praxis_lite.core.partitioner.compiled_steps import Step, StepOfWeights, TrainStep
from praxis_lite.core.partitioner.compiler_options import (
    ACCUMULATING,
    DECODING,
    init_options,
    more_options,
    step_options,
)
from praxis_lite.core.partitioner.decoding_weights import DecodingWeights
from praxis_lite.core.partitioner.gradient_strategy import Gradients, GradientStrategy
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
    """Compiles a task's steps for a mesh; any mesh, an unattached topology's included.

    Its steps are objects (`Step`): to be called, or traced and lowered for the shapes of a batch.

    Args:
      task: the single-device view.
      mesh: its Explicit axes are types of arrays in the train and eval steps. The state is on the
        mesh of the same devices with Auto axes.
      gradients: how gradients and metrics are made, such as by ExplicitCollectives of
        `praxis_lite.core.collectives`; None: XLA splits what one device would do.
      compiler_options: as of `MeshConfig`.

    Attributes:
      mesh: with Auto axes, of the state's arrays.
      layout: StateLayout of the TrainState.
      learner: the task's, bound to the weights.
      gradients: the functions that make gradients and metrics, of the strategy that was given.
      init: (key) -> TrainState, each array made in its shards.
      compiler_options: that the steps are compiled with on this mesh; None: there are none.
      train_options: those of the train step, with what micro-batches need.

    Raises:
      ConfigError: a weight's split does not fit, or XLA does not know a compiler option; before
        anything compiles.
    """

    def __init__(
        self, task: Task, mesh: Mesh, *,
        gradients: GradientStrategy | None = None,
        compiler_options: CompilerOptions | None = None,
    ):
        explicit_axes, mesh = explicit_axes_of(mesh), with_auto_axes(mesh)
        self.task, self.mesh = task, mesh
        self._num_ids = dict(task.num_ids())
        self.where = where = TaskOnMesh(task, mesh, explicit_axes)
        with where.tracing():  # A Linen module's init runs all of it, and may ask for the mesh.
            self.layout, self.learner = layout_and_learner(task, dict(mesh.shape))
        self._mdl_layout = self.layout.select("mdl_vars")
        self.gradients = (gradients or Gradients()).on(task, mesh, self._mdl_layout, self.learner)
        self.replicated = where.replicated
        self.compiler_options = step_options(compiler_options, mesh)
        self.train_options = self.compiler_options
        if task.learner.gradient_accumulation_steps > 1 or self.gradients.sums_in_a_loop:
            self.train_options = more_options(ACCUMULATING, self.compiler_options, mesh)
        placed = {"out_shardings": self.layout.shardings(mesh)}
        self.init = jax.jit(self._init, compiler_options=init_options(mesh), **placed)
        self._eval_params = jax.jit(
            self._eval_params_of_state, static_argnames="use_ema",
            out_shardings=self._mdl_layout.shardings(mesh)["params"],
        )

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """The step (state, GlobalBatch, key) -> (state, outputs), which donates its state."""
        return TrainStep(
            self.where, self.layout,
            functools.partial(
                steps.train_step, self.task, learner=self.learner,
                value_and_grad=self.gradients.value_and_grad,
                wrap_host_weights=self._mdl_layout.wrap_host_weights,
            ),
            required_inputs=self.task.required_inputs,
            check_rows=functools.partial(
                self.gradients.check_rows,
                num_micro_batches=self.task.learner.gradient_accumulation_steps,
            ),
            compiler_options=self.train_options,
        )

    @functools.cached_property
    def eval_step(self) -> StepOfWeights:
        """The step (mdl_vars, GlobalBatch, key) -> the metrics of a batch, on every device.

        Without a key it takes a fixed one.
        """
        return self._eval_step("eval_step", lambda metrics, examples, inputs: metrics)

    @functools.cached_property
    def eval_examples(self) -> StepOfWeights:
        """The step of `eval_step`'s arguments -> metrics, outputs [B, ...] by name, and bool [B].

        The last is False for padding rows.
        """
        return self._eval_step(
            "eval_examples", lambda metrics, examples, inputs: (
                metrics, examples, is_true_row(inputs)
            ),
        )

    def _eval_step(self, name: str, results: Callable[..., Any]) -> StepOfWeights:
        def pure(mdl_vars: PyTree, inputs: PyTree, key: jax.Array | None) -> Any:
            return results(*self.gradients.evaluate(self.task, mdl_vars, inputs, key), inputs)

        return StepOfWeights(
            name, "An evaluation step", self.where, self._mdl_layout, pure,
            required_inputs=self.task.required_inputs, may_lack_key=True,
            check_rows=functools.partial(self.gradients.check_rows, num_micro_batches=1),
            compiler_options=self.compiler_options,
        )

    @functools.cached_property
    def decode_options(self) -> dict[str, Any] | None:  # For programs that decode.
        return more_options(DECODING, self.compiler_options, self.mesh)

    @functools.cached_property
    def decoding_weights(self) -> DecodingWeights:  # Training has no use for it.
        specs, stored = self.task.model.weight_specs(), self.task.stored_for_decoding()
        return DecodingWeights(self._mdl_layout, specs, self.mesh, stored)

    @functools.cached_property
    def decode_step(self) -> StepOfWeights:
        """The step (mdl_vars, GlobalBatch, key) -> outputs, a row per real row of the batch.

        Weights that are not `for_decoding` it brings into that form at each call.
        """
        return StepOfWeights(
            "decode_step", "A decoding step", self.where, self.decoding_weights.layout,
            functools.partial(steps.decode_step, self.task),
            required_inputs=self.task.required_decode_inputs, may_lack_key=False,
            check_rows=lambda element_spec: None, compiler_options=self.decode_options,
            is_typed=False,  # JAX has no type of a cache that is written at a place of its own.
            in_form=lambda mdl_vars: self.decoding_weights.of(mdl_vars, "decode_step: mdl_vars"),
        )

    def for_decoding(self, mdl_vars: PyTree, *, donates: bool = False) -> PyTree:
        """Returns weights in the form that decoding reads: layers of a stack apart.

        `decode_step` and programs of `with_mdl_vars` take them, stored as `Decoder` settings say.

        Args:
          donates: each weight is deleted once its copy exists; otherwise both stay in memory.

        Raises:
          ConfigError: mdl_vars are not this Partitioner's.
        """
        return self.decoding_weights.of(mdl_vars, "for_decoding: mdl_vars", donates=donates)

    @property
    def steps(self) -> dict[str, Step]:
        """The steps by their kinds: "train", "eval", "eval_examples" and "decode"."""
        result = (self.train_step, self.eval_step, self.eval_examples, self.decode_step)
        return {step.kind: step for step in result}

    def key(self, seed: int) -> jax.Array:
        """Returns the run's key, on every device."""
        return replicated_key(jax.random.key(seed), self.mesh)

    def batch_key(self, seed: int, step: int, batch: int) -> jax.Array:
        """Returns the key to evaluate or decode with, on every device.

        Args:
          seed, step, batch: the run's, that of the weights, and the batch's index in its dataset.
        """
        # `fold_in` would round a float silently; `index` refuses it.
        key = jax.random.fold_in(jax.random.key(seed), operator.index(step))
        key = jax.random.fold_in(key, operator.index(batch))
        return replicated_key(key, self.mesh)

    def global_batch(self, inputs: PyTree, num_rows: int | None = None) -> GlobalBatch:
        """Returns a process's NumPy rows as global arrays; see `sharding.global_batch`.

        Raises:
          ConfigError: a leaf is not an array, or has an id that the model does not have; the leaves
            disagree on their rows.
        """
        arguments.check_rows(inputs, "global_batch", self._num_ids)
        return global_batch(inputs, self.mesh, num_rows)

    def process_rows(self, num_rows: int) -> slice:
        """Returns the rows of a global batch that this process feeds."""
        return process_rows(num_rows, self.mesh)

    def eval_mdl_vars(self, state: TrainState, *, use_ema: bool) -> PyTree:
        """Returns the mdl_vars to evaluate and decode with: a state's own, or averages of them.

        Args:
          state: only `Learner.eval_opt_states` of its opt_states are read.
          use_ema: take the moving averages that the learner keeps.

        Raises:
          ConfigError: `use_ema`, but the learner keeps no averages.
        """
        arguments.check_type(self.layout, state, "eval_mdl_vars: state")
        names = self.task.learner.eval_opt_states(self.layout.shapes.opt_states, use_ema=use_ema)
        if not names:
            return state.mdl_vars
        read = {name: state.opt_states[name] for name in names}
        params = self._eval_params(state.mdl_vars["params"], read, use_ema=use_ema)
        return {**state.mdl_vars, "params": params}

    def with_mdl_vars(
        self, function: Callable[..., Any], static_argnums: int | Sequence[int] = (),
        *, has_splits: bool = False,
    ) -> Callable[..., Any]:
        """Wraps `function`, of logical shapes, to take padded mdl_vars, `for_decoding` or not.

        To be compiled by `jax.jit` with the same `static_argnums`, for other steps than the three
        here. A GlobalBatch among the arguments reaches `function` as its inputs. XLA
        chooses the layout of other arguments and of the results, see `padding.evenly`.

        Args:
          has_splits: arguments and results have splits already, and are left as they are.

        Raises:
          ConfigError: mdl_vars are not this Partitioner's.
        """
        lay_out = (lambda tree: tree) if has_splits else evenly

        def on_the_mesh(mdl_vars: PyTree, *args: Any) -> Any:
            layout = self._mdl_layout
            if not layout.is_of(mdl_vars) and self.decoding_weights.layout.is_of(mdl_vars):
                layout = self.decoding_weights.layout
            arguments.check_tree(layout, mdl_vars, "with_mdl_vars: mdl_vars")
            with self.where.tracing():
                args = tuple(
                    self.where.inputs(x) if isinstance(x, GlobalBatch) else lay_out(x)
                    for x in args
                )
                return lay_out(function(layout.unpad(mdl_vars), *args))

        return without_xla_errors(on_the_mesh, static_argnums)

    def _init(self, key: jax.Array) -> TrainState:
        arguments.check_key(key, "init: key")
        with self.where.tracing():
            state = steps.init_state(self.task, key, self.learner)
            return self.layout.pad(state)

    def _eval_params_of_state(self, params: PyTree, opt_states: PyTree, *, use_ema: bool) -> PyTree:
        with self.where.tracing():
            layout = self._mdl_layout.select("params")
            opt_layout = self.layout.select("opt_states")
            opt_states = {name: opt_layout.select(name).unpad(x) for name, x in opt_states.items()}
            params = self.learner.eval_params(layout.unpad(params), opt_states, use_ema=use_ema)
            return layout.pad(params)
