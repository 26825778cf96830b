"""A job's decoding step, or its model's call, exported: weights and inputs are its arguments."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError, require, require_choice, shown
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, batch_spec
from praxis_lite.core.xla_workarounds.mended_products import mended_export
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.trainer.forward_pass import arrays_of, forward_on_the_mesh
from praxis_tools.export.inputs import ANY_ROWS, Inputs, Specs, What, takes_batches

# The name of the input with the data of a random key.
KEY = "key"
# Supported by jax.export.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# cuDNN's attention, for which jax guarantees no compatibility with later versions. TrainedModel
# uses it on a GPU too: without it the outputs would differ.
_CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")

# Errors of programs that compute with the number of rows, or that jax cannot export.
_REFUSALS = (
    TypeError, ValueError, NotImplementedError, jax.errors.InconclusiveDimensionOperation
)

# (mdl_vars, batch, key or None) -> outputs.
Computed = Callable[[Any, GlobalBatch, jax.Array | None], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function (weights, inputs) -> outputs, exported for a mesh.

    Attributes:
      exported: takes a list of padded weights, in the layout's order, and a dict of inputs.
      layout: of the weights.
      inputs: by name, with shardings; to decode, with `KEY`. Any number of rows is a symbolic dim.
      compiler_options: those of the job's own program on this mesh, or None.
    """

    exported: export.Exported
    layout: StateLayout
    inputs: Specs
    compiler_options: Mapping[str, Any] | None


def exported_program(
    partitioner: Partitioner, what: What, inputs: Inputs, platforms: Sequence[str] = ()
) -> Program:
    """Returns the program; nothing is compiled.

    Args:
      platforms: on which it is to run; empty: the mesh's.

    Raises:
      ConfigError: the task cannot compute with these inputs, or with any number of rows; a platform
        is unknown, or needs other kernels than the mesh's; jax cannot export an operation.
    """
    mesh, platforms = partitioner.mesh, _checked_platforms(platforms)
    require(KEY not in inputs.specs, "The name of an input", KEY, "another; a random key has it")
    specs = _placed(inputs, mesh)
    num_rows = next((x.shape[0] for x in specs.values() if x.shape), 0)
    layout, computed = (_decoding if what == "decode" else _call)(partitioner, inputs)
    structure = jax.tree.structure(layout.shapes)

    def program(weights: list[jax.Array], given: Mapping[str, jax.Array]) -> Any:
        arrays = {name: _split(given[name], mesh) for name in specs}
        mdl_vars = jax.tree.unflatten(structure, weights)
        return computed(mdl_vars, GlobalBatch(arrays, num_rows), given.get(KEY))

    if what == "decode":
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=partitioner.replicated)
        arguments = jax.tree.leaves(layout.abstract(mesh)), {**specs, KEY: key}
    else:
        arguments = jax.tree.leaves(layout.abstract(mesh)), specs
    compiled = jax.jit(
        program, in_shardings=jax.tree.map(lambda x: x.sharding, arguments),
        out_shardings=partitioner.replicated,
    )
    allowed = _CUDNN if "cuda" in platforms else ()
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in allowed]
    try:
        exported = export.export(compiled, platforms=platforms, disabled_checks=checks)(*arguments)
    except _REFUSALS as error:
        if isinstance(error, ConfigError) or (message := _why_not(str(error), inputs)) is None:
            raise
        raise ConfigError(message) from error
    options = partitioner.decode_options if what == "decode" else partitioner.compiler_options
    return Program(mended_export(exported, mesh), layout, arguments[1], options)


def _why_not(reason: str, inputs: Inputs) -> str | None:
    """Returns the message for an error of jax that the user can fix, or None for others."""
    if "host_callbacks" in reason or "custom calls whose targets" in reason:
        call = reason.rpartition("Examples are:")[2].strip()
        return (
            f"The program calls something that jax exports to no other process: "
            f"{shown(call, 300)} Set other kernels, and leave out callbacks to the host."
        )
    if inputs.any_rows:
        return (
            f"The program is not one for any number of rows: {shown(reason, 300)} Give "
            "--batch=ROWS, a number."
        )
    return None


def _checked_platforms(platforms: Sequence[str]) -> list[str]:
    own = export.default_export_platform()
    for platform in platforms:
        require_choice("--platforms", platform, PLATFORMS)
    if own != "cpu" and not set(platforms) <= {own}:
        raise ConfigError(
            f"--platforms is {','.join(platforms)}; expected {own} alone, because layers choose "
            f"kernels of {own}. For several platforms export on the CPU, with "
            "JAX_PLATFORMS=cpu in the environment."
        )
    return list(dict.fromkeys(platforms)) or [own]


def _placed(inputs: Inputs, mesh: Mesh) -> Specs:
    """Returns the inputs with shardings: split by rows, or replicated if the rows do not divide.

    Any number of rows is a multiple of the number of devices.
    """
    any_rows = export.symbolic_shape(f"{mesh.size}*{ANY_ROWS}") if inputs.any_rows else ()

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*any_rows, *x.shape[len(any_rows) :]) if x.shape else ()
        is_split = bool(shape) and shape[0] % mesh.size == 0
        spec = batch_spec(len(shape), mesh.axis_names) if is_split else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return {name: placed(x) for name, x in inputs.specs.items()}


def _split(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns an input padded and split by rows, as `global_batch` does."""
    if x.ndim == 0 or x.shape[0] % mesh.size == 0:
        return x
    x = jnp.pad(x, [(0, -x.shape[0] % mesh.size), *[(0, 0)] * (x.ndim - 1)])
    sharding = NamedSharding(mesh, batch_spec(x.ndim, mesh.axis_names))
    # With the barrier XLA knows no more than of an argument, so the outputs are bitwise equal.
    return jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(x, sharding))


def _decoding(partitioner: Partitioner, inputs: Inputs) -> tuple[StateLayout, Computed]:
    step = partitioner.decode_step
    step.check_batch(dict(inputs.specs))
    function = without_xla_errors(step.function)

    def computed(mdl_vars: Any, batch: GlobalBatch, key: jax.Array | None) -> Any:
        return function(mdl_vars, batch, jax.random.wrap_key_data(key))

    return step.layout, computed


def _call(partitioner: Partitioner, inputs: Inputs) -> tuple[StateLayout, Computed]:
    specs = dict(inputs.specs)
    _, rest = arrays_of((specs,), {}) if takes_batches(partitioner.task) else arrays_of((), specs)
    function = forward_on_the_mesh(partitioner)

    def computed(mdl_vars: Any, batch: GlobalBatch, key: jax.Array | None) -> Any:
        listed = [batch.inputs[name] for name in sorted(specs)]
        return function(mdl_vars, GlobalBatch(listed, batch.num_rows), rest)

    return partitioner.layout.select("mdl_vars"), computed
