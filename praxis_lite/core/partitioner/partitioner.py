"""A task on a mesh: sharded init, and compiled train, eval and decode steps. Nothing else."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import require_choice
from praxis_lite.core.models.axis_rules import flax_axis_rules
from praxis_lite.core.models.layer_paths import naming_the_layer
from praxis_lite.core.partitioner import arguments, steps
from praxis_lite.core.partitioner.compiler_options import init_options, step_options
from praxis_lite.core.partitioner.gradient_strategy import Gradients, GradientStrategy
from praxis_lite.core.partitioner.narrow_scans import narrow_scans
from praxis_lite.core.partitioner.train_state import TrainState, layout_and_learner
from praxis_lite.core.sharding.devices.xla_errors import without_xla_errors
from praxis_lite.core.sharding.inputs import (
    GlobalBatch,
    abstract_global_batch,
    check_inputs_split_mapping,
    global_batch,
    is_true_row,
    process_rows,
    replicated_key,
    reshard_by_rank,
    true_rows,
)
from praxis_lite.core.sharding.mesh import CompilerOptions
from praxis_lite.core.sharding.padding import evenly
from praxis_lite.core.task import Task, WeightedScalars

PyTree = Any
STEPS = ("train", "eval", "eval_examples", "decode")


class Partitioner:
    """Compiles a task's steps for a mesh; any mesh, an unattached topology's included.

    Every compiled step slices the padding off the state and the batch, reshards the inputs by
    rank, runs the pure step, and (train) pads the new state.

    Args:
      task: the single-device view.
      mesh: with Auto axes.
      gradients: how gradients and metrics are made, such as by ExplicitCollectives of
        `praxis_lite.collectives`; None: XLA splits what one device would do.
      compiler_options: as of `MeshConfig`.
      value_and_grad, evaluate: former arguments: fields of `Gradients`.

    Attributes:
      layout: StateLayout of the TrainState.
      learner: the task's, bound to the weights.
      gradients: the functions that make gradients and metrics, of the strategy that was given.
      init: (key) -> TrainState, each array made in its shards.
      train_step: (state, GlobalBatch, key) -> (state, outputs); the state passed in is donated.
      compiler_options: that the steps are compiled with on this mesh; None: there are none.
      decode_step: (mdl_vars, GlobalBatch, key) -> outputs, a row per true row of the batch.

    Raises:
      ConfigError: a weight's split does not fit, or XLA does not know a compiler option; before
        anything compiles.
    """

    def __init__(
        self, task: Task, mesh: Mesh, *,
        gradients: GradientStrategy | None = None,
        compiler_options: CompilerOptions | None = None,
        value_and_grad: Callable[..., Any] | None = None,
        evaluate: Callable[..., Any] | None = None,
    ):
        if value_and_grad or evaluate:
            warnings.warn(
                "Partitioner(value_and_grad=..., evaluate=...) is Partitioner(gradients=Gradients("
                "value_and_grad, evaluate)) now; the former arguments go with the next minor "
                "version.", DeprecationWarning, stacklevel=2,
            )
            given = {"value_and_grad": value_and_grad, "evaluate": evaluate}
            gradients = Gradients(**{name: x for name, x in given.items() if x})
        self.task, self.mesh = task, mesh
        self._num_ids = dict(task.num_ids())
        with self._tracing():  # A Linen module's init runs all of it, and may ask for the mesh.
            self.layout, self.learner = layout_and_learner(task, dict(mesh.shape))
        self._mdl_layout = self.layout.select("mdl_vars")
        self.gradients = (gradients or Gradients()).on(task, mesh, self._mdl_layout, self.learner)
        self._arguments = arguments.StepArguments(task, self.layout, mesh)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        state_shardings = self.layout.shardings(mesh)
        mdl_shardings = state_shardings.mdl_vars
        self.compiler_options = options = step_options(compiler_options, mesh)
        # The batch's sharding is None, "as it comes": `global_batch` has placed it.
        checked = self._arguments.checked
        self.init = jax.jit(
            self._init, out_shardings=state_shardings, compiler_options=init_options(mesh)
        )
        self.train_step = checked("train_step", jax.jit(
            without_xla_errors(self._train_step, also=narrow_scans),
            in_shardings=(state_shardings, None, self.replicated),
            out_shardings=(state_shardings, self.replicated),
            donate_argnums=0, compiler_options=options,
        ))
        of_weights = {
            "in_shardings": (mdl_shardings, None, self.replicated),
            "out_shardings": self.replicated, "compiler_options": options,
        }
        self._eval = checked("eval_step", jax.jit(
            without_xla_errors(self._eval_step, static_argnums=3), static_argnums=3, **of_weights
        ))
        self.decode_step = checked(
            "decode_step", jax.jit(without_xla_errors(self._decode_step), **of_weights)
        )
        self._eval_params = jax.jit(
            self._eval_params_of_state,
            static_argnames="use_ema",
            out_shardings=mdl_shardings["params"],
        )

    def key(self, seed: int) -> jax.Array:
        """Returns the run's key, on every device."""
        arguments.check_integers("key", seed=seed)
        return replicated_key(jax.random.key(seed), self.mesh)

    def batch_key(self, seed: int, step: int, batch: int) -> jax.Array:
        """Returns the key to evaluate or decode with, on every device.

        Args:
          seed, step, batch: the run's, that of the weights, and the batch's index in its dataset.
        """
        arguments.check_integers("batch_key", seed=seed, step=step, batch=batch)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), batch)
        return replicated_key(key, self.mesh)

    def eval_step(
        self, mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None = None
    ) -> WeightedScalars:
        """Returns the metrics of a batch, on every device; without a key, with a fixed key."""
        return self._eval(mdl_vars, batch, key, False)

    def eval_examples(
        self, mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None = None
    ) -> tuple[WeightedScalars, dict[str, jax.Array], jax.Array]:
        """Returns metrics, outputs [B, ...] by name, and bool [B]: False for rows of filler."""
        return self._eval(mdl_vars, batch, key, True)

    def global_batch(self, inputs: PyTree, num_rows: int | None = None) -> GlobalBatch:
        """Returns a process's NumPy rows as global arrays; see `sharding.global_batch`.

        Raises:
          ConfigError: a leaf is no array, or has an id that the model has not; the leaves disagree
            on their rows.
        """
        arguments.check_rows(inputs, "global_batch", self._num_ids)
        return global_batch(inputs, self.mesh, num_rows)

    def process_rows(self, num_rows: int) -> slice:
        """Returns which rows of a global batch this process feeds."""
        arguments.check_integers("process_rows", num_rows=num_rows)
        return process_rows(num_rows, self.mesh)

    def check_batch(self, element_spec: PyTree, step: str = "train") -> None:
        """Raises a ConfigError if a batch's leaves disagree on rows, or a rank has no mapping."""
        arguments.check_spec(element_spec, "check_batch")
        abstract_global_batch(element_spec, self.mesh)
        check_inputs_split_mapping(
            element_spec, self.task.inputs_split_mapping, self.mesh.axis_names
        )
        if step != "decode":
            number = self.task.learner.gradient_accumulation_steps if step == "train" else 1
            self.gradients.check_rows(element_spec, number)

    def lower(self, step: str, element_spec: PyTree) -> jax.stages.Lowered:
        """Returns a step, named as in `trace`, lowered for batches of `element_spec`."""
        return self.trace(step, element_spec).lower()

    def trace(self, step: str, element_spec: PyTree) -> jax.stages.Traced:
        """Returns a step traced for batches of `element_spec`; the first call finds it traced.

        Args:
          step: "train", "eval", "eval_examples" or "decode".

        Raises:
          ConfigError: what a layer or the task refuses only when it is called, such as an
            activation's mapping.
        """
        require_choice("Partitioner: step", step, STEPS)
        arguments.check_spec(element_spec, "trace")
        batch = abstract_global_batch(element_spec, self.mesh)
        state = self.layout.abstract(self.mesh)
        # Placed as `key` places it: the compiled program is then the one that calls find cached.
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.replicated)
        if step == "train":
            return self.train_step.trace(state, batch, key)
        if step.startswith("eval"):
            return self._eval.trace(state.mdl_vars, batch, key, step == "eval_examples")
        return self.decode_step.trace(state.mdl_vars, batch, key)

    def step_function(self, step: str) -> Callable[..., PyTree]:
        """Returns a step, named as in `trace`, before it is compiled; of the same arguments."""
        require_choice("Partitioner: step", step, STEPS)
        if step == "train":
            return self._train_step
        if step == "decode":
            return self._decode_step
        return functools.partial(self._eval_step, with_examples=step == "eval_examples")

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
        """Wraps `function` to take padded mdl_vars; `function` sees logical shapes.

        To be compiled by `jax.jit` with the same `static_argnums`, for other steps than the three
        here. A GlobalBatch among the arguments reaches `function` as its inputs. Other arguments
        and the results lie as XLA likes, see `padding.evenly`.

        Args:
          has_splits: arguments and results lie well already, and are left as they are.

        Raises:
          ConfigError: mdl_vars are not this Partitioner's.
        """

        lay_out = (lambda tree: tree) if has_splits else evenly

        def on_the_mesh(mdl_vars: PyTree, *args: Any) -> Any:
            arguments.check_tree(self._mdl_layout, mdl_vars, "with_mdl_vars: mdl_vars")
            with self._tracing():
                args = tuple(
                    self._inputs(x) if isinstance(x, GlobalBatch) else lay_out(x)
                    for x in args
                )
                return lay_out(function(self._mdl_layout.unpad(mdl_vars), *args))

        return without_xla_errors(on_the_mesh, static_argnums)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        # The mesh is set while a step is traced, so that no caller has to and no call pays for it.
        with (
            naming_the_layer(),
            jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
            flax_axis_rules(self.task.weight_sharding),
        ):
            yield

    def _inputs(self, batch: GlobalBatch, call: str | None = None) -> PyTree:
        axis_names = self.mesh.axis_names
        inputs = true_rows(batch, axis_names)
        if call is not None:
            self._arguments.check_inputs(call, inputs)
        return reshard_by_rank(inputs, self.task.inputs_split_mapping, axis_names)

    def _init(self, key: jax.Array) -> TrainState:
        arguments.check_key(key, "init: key")
        with self._tracing():
            state = steps.init_state(self.task, key, self.learner)
            return self.layout.pad(state)

    def _train_step(self, state: TrainState, batch: GlobalBatch, key: jax.Array):
        self._arguments.check("train_step", state, batch, key)
        with self._tracing():
            state = self.layout.unpad(state)
            state, outputs = steps.train_step(
                self.task, state, self._inputs(batch, "train_step"), key,
                learner=self.learner, value_and_grad=self.gradients.value_and_grad,
            )
            return self.layout.pad(state), outputs

    def _eval_params_of_state(self, params: PyTree, opt_states: PyTree, *, use_ema: bool) -> PyTree:
        with self._tracing():
            layout = self._mdl_layout.select("params")
            opt_layout = self.layout.select("opt_states")
            opt_states = {name: opt_layout.select(name).unpad(x) for name, x in opt_states.items()}
            params = self.learner.eval_params(layout.unpad(params), opt_states, use_ema=use_ema)
            return layout.pad(params)

    def _eval_step(
        self, mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None, with_examples: bool
    ) -> PyTree:
        self._arguments.check("eval_step", mdl_vars, batch, key, with_examples)
        with self._tracing():
            inputs = self._inputs(batch, "eval_step")
            mdl_vars = self._mdl_layout.unpad(mdl_vars)
            metrics, examples = self.gradients.evaluate(self.task, mdl_vars, inputs, key)
            return (metrics, examples, is_true_row(inputs)) if with_examples else metrics

    def _decode_step(self, mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array):
        self._arguments.check("decode_step", mdl_vars, batch, key)
        with self._tracing():
            mdl_vars = self._mdl_layout.unpad(mdl_vars)
            inputs = self._inputs(batch, "decode_step")
            return steps.decode_step(self.task, mdl_vars, inputs, key)
