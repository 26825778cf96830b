"""Step: a task's step, compiled for a mesh. A Step can be called, traced or lowered."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.core.partitioner import arguments
from praxis_lite.core.partitioner.task_on_mesh import TaskOnMesh
from praxis_lite.core.partitioner.train_state import StateLayout, TrainState
from praxis_lite.core.sharding.batch_sharding import (
    GlobalBatch,
    abstract_global_batch,
    check_inputs_split_mapping,
)
from praxis_lite.core.xla_workarounds.narrow_scans import narrow_scans
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors

__all__ = ("Step", "StepOfWeights")

PyTree = Any


class Step:
    """A step of a task on a mesh, compiled once per batch shape.

    A step slices the padding off its arguments, reshards the inputs by rank and calls a pure
    function.

    Args:
      name: Name of the Partitioner's attribute, such as "train_step".
      title: Title of the step in messages, such as "A training step".
      task_on_mesh: The task and the mesh.
      layout: Layout of the arrays that the step is called with.
      pure: Function of unpadded arrays, inputs and a key, written as if for a single device.
      required_inputs: Leaves of a batch that the task reads.
      check_rows: Takes the shapes of a batch, and raises ConfigError if its rows cannot be split.
      is_typed: Whether the mesh's Explicit axes are part of array types in the step.

    Attributes:
      task_on_mesh: The task and the mesh.
      layout: Layout of the arrays that the step is called with.
      function: The step before compilation, which takes the same arguments.
      trains: Whether the step takes and returns the complete state. Other steps take weights.
      untyped: Filled when the step is traced on a mesh with Explicit axes. Maps a layer's path to
        the reason why JAX cannot type its arrays.
    """

    trains: bool
    _wraps_host_weights: bool  # Whether `pure` takes weights in host memory as `HostWeight`s.
    _arrays: str  # Name of the first argument, for messages.
    _may_lack_key = False

    def __init__(
        self,
        name: str,
        title: str,
        task_on_mesh: TaskOnMesh,
        layout: StateLayout,
        pure: Callable[..., Any],
        *,
        required_inputs: tuple[str, ...],
        check_rows: Callable[[PyTree], None],
        is_typed: bool = True,
    ):
        self.name, self.title, self.required_inputs = name, title, required_inputs
        self.task_on_mesh, self.layout, self._check_rows = task_on_mesh, layout, check_rows
        self.untyped: dict[str, str] = {}
        self._pure = task_on_mesh.typed(pure, layout.specs, self.untyped) if is_typed else pure

    @property
    def kind(self) -> str:
        """The name of the step in reports: "train", "eval", "eval_examples" or "decode"."""
        return self.name.removesuffix("_step")

    def trace(self, *given: Any) -> jax.stages.Traced:
        """Traces the step; later calls with the same shapes reuse the trace.

        Args:
          given: Either the shapes and dtypes of a batch's rows, or all arguments of a call.

        Returns:
          The traced step.

        Raises:
          ConfigError: A layer or the task raised the error while being traced, for example because
            of an invalid sharding of an activation.
        """
        return self._jitted.trace(*(given if len(given) > 1 else self.abstract(*given)))

    def lower(self, *given: Any) -> jax.stages.Lowered:
        """Traces and lowers the step; for `given`, see `trace`."""
        lowered: jax.stages.Lowered = self.trace(*given).lower()
        return lowered

    @property
    def program(self) -> Callable[..., Any]:
        """The step as returned by `jax.jit`, without checks of its arguments."""
        return self._jitted

    def num_compiled(self) -> int:
        """Returns the number of batch shapes for which the step has been compiled in calls."""
        num: int = self._jitted._cache_size()  # type: ignore[attr-defined]  # Not in jax.stages.
        return num

    def check(self, arrays: PyTree, batch: Any, key: Any) -> None:
        """Raises ConfigError, naming the argument, if an argument of a call is invalid."""
        mesh = self.task_on_mesh.mesh
        arguments.check_tree(self.layout, arrays, f"{self.name}: {self._arrays}", mesh)
        arguments.check_batch(batch, f"{self.name}: batch", mesh)
        arguments.check_key(key, f"{self.name}: key", self._may_lack_key)

    def check_batch(self, element_spec: PyTree) -> None:
        """Raises ConfigError if the step cannot run on batches with these shapes."""
        arguments.check_spec(element_spec, "check_batch")
        mesh = self.task_on_mesh.mesh
        abstract_global_batch(element_spec, mesh)
        mapping = self.task_on_mesh.task.inputs_split_mapping
        check_inputs_split_mapping(element_spec, mapping, mesh.axis_names)
        self._check_rows(element_spec)

    def abstract(self, element_spec: PyTree) -> tuple[PyTree, GlobalBatch, jax.ShapeDtypeStruct]:
        """Returns the shapes and shardings of a call's arguments for batches with this spec."""
        arguments.check_spec(element_spec, "trace")
        batch = abstract_global_batch(element_spec, self.task_on_mesh.mesh)
        # Use the sharding of `Partitioner.key`, so that calls reuse the compiled step.
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.task_on_mesh.replicated)
        return self.layout.abstract(self.task_on_mesh.mesh), batch, key

    def _jit(
        self,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None,
        also: Callable[[Any], Any] = lambda jaxpr: jaxpr,
        **settings: Any,
    ) -> None:
        function.__name__ = f"_{self.name}"
        shardings, replicated = (
            self.layout.shardings(self.task_on_mesh.mesh),
            self.task_on_mesh.replicated,
        )
        self.function = function
        # The batch has no in_shardings, because `global_batch` has already placed it.
        self._jitted = jax.jit(
            without_xla_errors(function, also=also),
            in_shardings=(shardings, None, replicated),
            out_shardings=(shardings, replicated) if self.trains else replicated,
            compiler_options=compiler_options,
            **settings,
        )
        self._call_checked = functools.partial(arguments.checked_call, self._jitted, self.check)

    def _call_pure(self, arrays: PyTree, batch: GlobalBatch, key: Any) -> Any:
        if self.required_inputs:
            self.task_on_mesh.task.check_inputs(batch.inputs, self.required_inputs, self.name)
        # Weights in host memory are transferred as late as possible, by the layers that read them.
        arrays = self.layout.unpad(arrays, except_on_host=True)
        if self._wraps_host_weights:
            arrays = self.layout.wrap_host_weights(arrays)
        return self._pure(arrays, self.task_on_mesh.unpadded_inputs(batch), key)


class TrainStep(Step):
    """The step (state, batch, key) -> (state, outputs); it donates its input state."""

    trains, _wraps_host_weights, _arrays = True, False, "state"

    def __init__(self, *args: Any, compiler_options: dict[str, Any] | None, **named: Any):
        super().__init__("train_step", "A training step", *args, **named)

        def on_the_mesh(
            state: TrainState, batch: GlobalBatch, key: jax.Array
        ) -> tuple[TrainState, dict[str, Any]]:
            self.check(state, batch, key)
            with self.task_on_mesh.tracing():
                state, outputs = self._call_pure(state, batch, key)
                return self.layout.pad(state), outputs

        self._jit(on_the_mesh, compiler_options, narrow_scans, donate_argnums=0)

    def __call__(
        self, state: TrainState, batch: GlobalBatch, key: jax.Array
    ) -> tuple[TrainState, dict[str, Any]]:
        new: tuple[TrainState, dict[str, Any]] = self._call_checked(state, batch, key)
        return new


class StepOfWeights(Step):
    """A step (mdl_vars, batch, key) -> outputs; it does not donate the weights.

    Args:
      may_lack_key: Whether the key is optional.
      to_layout: Converts the weights that are passed in a call to the step's layout.
    """

    trains, _wraps_host_weights, _arrays = False, True, "mdl_vars"

    def __init__(
        self,
        *args: Any,
        compiler_options: dict[str, Any] | None,
        may_lack_key: bool,
        to_layout: Callable[[PyTree], PyTree] = lambda mdl_vars: mdl_vars,
        **named: Any,
    ):
        super().__init__(*args, **named)
        self._may_lack_key, self._to_layout = may_lack_key, to_layout

        def on_the_mesh(mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None) -> PyTree:
            self.check(mdl_vars, batch, key)
            with self.task_on_mesh.tracing():
                return self._call_pure(mdl_vars, batch, key)

        self._jit(on_the_mesh, compiler_options)

    def __call__(
        self, mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None = None
    ) -> PyTree:
        return self._call_checked(self._to_layout(mdl_vars), batch, key)


class StepOfState(StepOfWeights):
    """A step (state, batch, key) -> outputs; it does not donate the state."""

    _wraps_host_weights, _arrays = False, "state"
