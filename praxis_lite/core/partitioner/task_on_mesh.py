"""TaskOnMesh: sets the mesh and sharding rules under which a task's steps are traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax.core import spmd
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.models.layer_paths import prefix_layer_path
from praxis_lite.core.sharding.batch_sharding import (
    GlobalBatch,
    batch_spec,
    drop_padding_rows,
    reshard_by_rank,
)
from praxis_lite.core.sharding.devices.axis_types import (
    check_even_split,
    collect_untyped_notes,
    is_type_error,
    only_axes,
)
from praxis_lite.core.sharding.leaf_paths import path_of
from praxis_lite.core.sharding.split_dims import to_partition_spec
from praxis_lite.core.sharding.weight_sharding import WeightSharding, check_axes
from praxis_lite.core.task import Task
from praxis_lite.core.user_lines import user_line

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TaskOnMesh:
    """A task together with the mesh that its steps are compiled for.

    Attributes:
      task: The task.
      mesh: The mesh, with Auto axes.
      explicit_axes: The axes that are Explicit inside typed steps.
    """

    task: Task
    mesh: Mesh
    explicit_axes: tuple[str, ...] = ()

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Sets the mesh and the axis rules while a function is being traced."""
        with (
            prefix_layer_path(),
            jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
            flax_axis_rules(self.task.weight_sharding),
        ):
            yield

    def unpadded_inputs(self, batch: GlobalBatch) -> PyTree:
        """Drops padding rows and reshards each array by its rank; call it while tracing."""
        axis_names = self.mesh.axis_names
        inputs = drop_padding_rows(batch, axis_names)
        return reshard_by_rank(inputs, self.task.inputs_split_mapping, axis_names)

    def typed(
        self, pure: Callable[..., Any], specs: PyTree, notes: dict[str, str]
    ) -> Callable[..., Any]:
        """Returns a pure step (arrays, inputs, key) in which Explicit axes are part of array types.

        Without Explicit axes, `pure` is returned unchanged.

        Args:
          pure: The step, written as if for a single device.
          specs: PartitionSpecs of the arrays, extended to their ranks.
          notes: Output dict for the reasons why layers are untyped, keyed by layer path.

        Returns:
          The step. It raises ConfigError if a dim is not divisible by the Explicit axes that split
          it.
        """
        if not self.explicit_axes:
            return pure
        axis_names, mapping = self.mesh.axis_names, self.task.inputs_split_mapping or {}

        def spec_of_rows(x: jax.Array) -> PartitionSpec:
            split = mapping.get(f"map_{x.ndim}d") if x.ndim else ()
            if split is None:
                return batch_spec(x.ndim, axis_names)
            return to_partition_spec(split, axis_names, rank=x.ndim)

        # JAX types contain only Explicit axes. The compiler propagates shardings over the other
        # axes.
        def type_of(path: tuple[Any, ...], x: jax.Array, spec: PartitionSpec) -> PartitionSpec:
            check_even_split(x.shape, spec, f"{path_of(path)}", self.mesh, self.explicit_axes)
            return only_axes(spec, self.explicit_axes)

        def typed(arrays: PyTree, inputs: PyTree, key: Any) -> Any:
            input_specs = jax.tree.map(spec_of_rows, inputs)
            types = (
                jax.tree.map_with_path(type_of, arrays, specs),
                jax.tree.map_with_path(type_of, inputs, input_specs),
                jax.tree.map(lambda _: PartitionSpec(), key),
            )
            explicit = jax.sharding.explicit_axes(pure, axes=self.explicit_axes, in_sharding=types)
            # A new trace replaces the notes of the previous trace.
            notes.clear()
            try:
                with collect_untyped_notes(notes):
                    return explicit(arrays, inputs, key)
            except Exception as error:
                if not is_type_error(error) or isinstance(error, ConfigError):
                    raise
                line = user_line(error)
                location = f" in {line.filename}:{line.lineno} ({line.line})" if line else ""
                raise ConfigError(
                    f"JAX has no type for a result{location} over the Explicit axes "
                    f"{self.explicit_axes}: {error} Specify its sharding there (out_sharding=, "
                    "jax.sharding.reshard), wrap the computation in praxis_lite.core.untyped, set "
                    "has_types = False in the BaseLayer, or set mesh.axis_types=auto."
                ) from error

        return typed


@contextlib.contextmanager
def flax_axis_rules(weight_sharding: WeightSharding | None) -> Iterator[None]:
    """Makes Flax use the job's logical axis rules to constrain activations.

    `nn.with_logical_constraint` and NNX's metadata use these rules while a step is being traced. If
    the job has no rules, the caller's rules stay in effect.

    Raises:
      ConfigError: A mesh is set, and a rule uses an axis that the mesh does not have.
    """
    rules = weight_sharding.rules_in_use if weight_sharding is not None else ()
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_axes(rules, mesh.shape)
    with spmd.logical_axis_rules(rules) if rules else contextlib.nullcontext():
        yield
