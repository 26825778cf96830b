"""The steps of a task on a mesh as objects: called, or traced and lowered for batches to come."""

import functools
from collections.abc import Callable, Mapping
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
    """A step of a task on a mesh, which compiles for each shape of batch that it is called with.

    It slices the padding off the arrays and the batch, reshards the inputs by rank and runs a pure
    function.

    Args:
      name: its attribute of the Partitioner, such as "train_step".
      title: the subject of a sentence: "A training step".
      where: the task and the mesh.
      layout: of the arrays that it is called with.
      pure: called with unpadded arrays, inputs and a key, as if on a single device.
      required_inputs: the leaves of a batch that the task reads.
      check_rows: called with the shapes of a batch; raises ConfigError if the rows cannot be cut.
      is_typed: Explicit axes of the mesh are types in it.

    Attributes:
      where: the task and the mesh.
      layout: of the arrays that it is called with.
      function: the step before it is compiled, of the same arguments.
      trains: it takes and returns all of the state; else it takes the weights alone.
      untyped: once it is traced, by path of a layer why JAX has no types of its inside, where the
        mesh has Explicit axes.
    """

    trains: bool
    _arrays: str  # Their name, in messages.
    _may_lack_key = False

    def __init__(
        self, name: str, title: str, where: TaskOnMesh, layout: StateLayout,
        pure: Callable[..., Any], *, required_inputs: tuple[str, ...],
        check_rows: Callable[[PyTree], None], is_typed: bool = True,
    ):
        self.name, self.title, self.required_inputs = name, title, required_inputs
        self.where, self.layout, self._check_rows = where, layout, check_rows
        self.untyped = {}
        self._pure = where.typed(pure, layout.specs, self.untyped) if is_typed else pure

    @property
    def kind(self) -> str:
        """The name in reports and files: "train", "eval", "eval_examples" or "decode"."""
        return self.name.removesuffix("_step")

    def trace(self, *given: Any) -> jax.stages.Traced:
        """Returns the step traced; the first call finds it traced.

        Args:
          given: the shapes and types of a batch's rows; or all arguments of a call.

        Raises:
          ConfigError: what a layer or the task refuses only when it is called, such as an
            activation's mapping.
        """
        return self._compiled.trace(*(given if len(given) > 1 else self.abstract(*given)))

    def lower(self, *given: Any) -> jax.stages.Lowered:
        """Returns the step lowered; `given` as of `trace`."""
        return self.trace(*given).lower()

    @property
    def program(self) -> Callable[..., Any]:
        """The step as `jax.jit` returns it: no argument is checked before a call."""
        return self._compiled

    def num_compiled(self) -> int:
        """Returns how many programs the calls have compiled."""
        return self._compiled._cache_size()

    def check(self, arrays: PyTree, batch: Any, key: Any) -> None:
        """Raises a ConfigError that names the wrong argument of a call, if any."""
        mesh = self.where.mesh
        arguments.check_tree(self.layout, arrays, f"{self.name}: {self._arrays}", mesh)
        arguments.check_batch(batch, f"{self.name}: batch", mesh)
        arguments.check_key(key, f"{self.name}: key", self._may_lack_key)

    def check_batch(self, element_spec: PyTree) -> None:
        """Raises a ConfigError if a batch's leaves disagree on rows, or a rank has no mapping."""
        arguments.check_spec(element_spec, "check_batch")
        mesh = self.where.mesh
        abstract_global_batch(element_spec, mesh)
        mapping = self.where.task.inputs_split_mapping
        check_inputs_split_mapping(element_spec, mapping, mesh.axis_names)
        self._check_rows(element_spec)

    def abstract(self, element_spec: PyTree) -> tuple[PyTree, GlobalBatch, jax.ShapeDtypeStruct]:
        """Returns the shapes of a call's arguments for batches of `element_spec`."""
        arguments.check_spec(element_spec, "trace")
        batch = abstract_global_batch(element_spec, self.where.mesh)
        # Placed as `key` places it: the compiled program is then the one that calls find cached.
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.where.replicated)
        return self.layout.abstract(self.where.mesh), batch, key

    def _compile(
        self, function: Callable[..., Any], compiler_options: Mapping[str, Any] | None,
        also: Callable[[Any], Any] = lambda jaxpr: jaxpr, **settings: Any,
    ) -> None:
        function.__name__ = f"_{self.name}"
        arrays, whole = self.layout.shardings(self.where.mesh), self.where.replicated
        self.function = function
        # The batch's sharding is None, "as it comes": `global_batch` has placed it.
        self._compiled = jax.jit(
            without_xla_errors(function, also=also), in_shardings=(arrays, None, whole),
            out_shardings=(arrays, whole) if self.trains else whole,
            compiler_options=compiler_options, **settings,
        )
        self._checked = functools.partial(arguments.checked_call, self._compiled, self.check)

    def _computed(self, arrays: PyTree, batch: GlobalBatch, key: Any) -> Any:
        if self.required_inputs:
            self.where.task.check_inputs(batch.inputs, self.required_inputs, self.name)
        # What is on the host is fetched where it is needed, as late as that.
        arrays = self.layout.unpad(arrays, but_on_host=True)
        arrays = arrays if self.trains else self.layout.wrap_host_weights(arrays)
        return self._pure(arrays, self.where.inputs(batch), key)


class TrainStep(Step):
    """(state, batch, key) -> (state, outputs); the state that is passed in is donated."""

    trains, _arrays = True, "state"

    def __init__(self, *args: Any, compiler_options: Mapping[str, Any] | None, **named: Any):
        super().__init__("train_step", "A training step", *args, **named)

        def on_the_mesh(state: TrainState, batch: GlobalBatch, key: jax.Array) -> tuple:
            self.check(state, batch, key)
            with self.where.tracing():
                state, outputs = self._computed(state, batch, key)
                return self.layout.pad(state), outputs

        self._compile(on_the_mesh, compiler_options, narrow_scans, donate_argnums=0)

    def __call__(
        self, state: TrainState, batch: GlobalBatch, key: jax.Array
    ) -> tuple[TrainState, dict[str, Any]]:
        return self._checked(state, batch, key)


class StepOfWeights(Step):
    """(mdl_vars, batch, key) -> outputs; the weights are kept.

    Args:
      may_lack_key: without a key a fixed one is taken.
      in_form: brings the weights of a call into the form of the layout.
    """

    trains, _arrays = False, "mdl_vars"

    def __init__(
        self, *args: Any, compiler_options: Mapping[str, Any] | None, may_lack_key: bool,
        in_form: Callable[[PyTree], PyTree] = lambda mdl_vars: mdl_vars, **named: Any,
    ):
        super().__init__(*args, **named)
        self._may_lack_key, self._in_form = may_lack_key, in_form

        def on_the_mesh(mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None) -> PyTree:
            self.check(mdl_vars, batch, key)
            with self.where.tracing():
                return self._computed(mdl_vars, batch, key)

        self._compile(on_the_mesh, compiler_options)

    def __call__(
        self, mdl_vars: PyTree, batch: GlobalBatch, key: jax.Array | None = None
    ) -> PyTree:
        return self._checked(self._in_form(mdl_vars), batch, key)
