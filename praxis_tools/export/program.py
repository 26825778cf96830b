"""Exports a job's decode step or its model's forward pass as a function of weights and inputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError, require_choice, shortened
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, batch_spec
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_exported_matmuls
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.trainer.forward_pass import arrays_of, forward_on_the_mesh
from praxis_tools.export.inputs import ANY_ROWS, Inputs, Specs, What, takes_batches

# Name of the input that holds the raw data of a random key.
KEY = "key"
# Platforms that jax.export supports.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# cuDNN's attention kernels. jax.export rejects them by default, because their compatibility with
# later versions is not guaranteed. They are allowed here because TrainedModel also uses them on
# GPUs, and outputs would differ without them.
_CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")

# Errors that jax raises if the model branches on a symbolic number of rows, or cannot be exported.
_EXPORT_ERRORS = (
    TypeError,
    ValueError,
    NotImplementedError,
    jax.errors.InconclusiveDimensionOperation,
)

# Takes (mdl_vars, batch, key or None) and returns the outputs.
ProgramFunction = Callable[[Any, GlobalBatch, jax.Array | None], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function exported for a mesh, which maps weights and inputs to outputs.

    Attributes:
      exported: Function that takes a list of padded weights (in the layout's order) and a dict of
        inputs.
      layout: Layout of the weights.
      inputs: Maps the name of each input to its shape, dtype and sharding. A decode step also has
        the input `KEY`. The first dim is symbolic if the program accepts any number of rows.
      compiler_options: Compiler options that the job uses on this mesh, or None.
    """

    exported: export.Exported
    layout: StateLayout
    inputs: Specs
    compiler_options: Mapping[str, Any] | None


def exported_program(
    partitioner: Partitioner, what: What, inputs: Inputs, platforms: Sequence[str] = ()
) -> Program:
    """Traces and exports a program, without compiling it.

    Args:
      partitioner: Partitioner of the trained model.
      what: "decode" for the decode step, "predict" for the forward pass.
      inputs: Shapes and dtypes of the inputs.
      platforms: Platforms that the program must run on. The default is the mesh's platform.

    Raises:
      ConfigError: The task does not accept these inputs or a symbolic number of rows, a platform is
        unknown or uses different kernels than the mesh's platform, or jax cannot export an
        operation.
    """
    mesh, platforms = partitioner.mesh, _check_platforms(platforms)
    if KEY in inputs.specs:
        raise ConfigError(
            f"The input name {KEY!r} is reserved for the random key. Rename the input."
        )
    specs = _with_shardings(inputs, mesh)
    num_rows = next((x.shape[0] for x in specs.values() if x.shape), 0)
    # Each returns the layout of the weights, and a function of (weights, batch, key).
    build = _decode_function if what == "decode" else _forward_function
    layout, function = build(partitioner, inputs)
    structure = jax.tree.structure(layout.shapes)

    # The weights are a list, in the order of the leaves of the layout.
    def program(weights: list[jax.Array], named_inputs: Mapping[str, jax.Array]) -> Any:
        arrays = {name: _pad_and_split(named_inputs[name], mesh) for name in specs}
        mdl_vars = jax.tree.unflatten(structure, weights)
        return function(mdl_vars, GlobalBatch(arrays, num_rows), named_inputs.get(KEY))

    # A decode step also takes a random key, as raw data.
    if what == "decode":
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=partitioner.replicated)
        arguments = jax.tree.leaves(layout.abstract(mesh)), {**specs, KEY: key}
    else:
        arguments = jax.tree.leaves(layout.abstract(mesh)), specs
    compiled = jax.jit(
        program,
        in_shardings=jax.tree.map(lambda x: x.sharding, arguments),
        out_shardings=partitioner.replicated,
    )
    allowed = _CUDNN if "cuda" in platforms else ()
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in allowed]
    try:
        exported = export.export(compiled, platforms=platforms, disabled_checks=checks)(*arguments)
    except _EXPORT_ERRORS as error:
        message = _message_for_user(str(error), inputs)
        if isinstance(error, ConfigError) or message is None:
            raise
        raise ConfigError(message) from error
    options = partitioner.decode_options if what == "decode" else partitioner.compiler_options
    return Program(patch_exported_matmuls(exported, mesh), layout, arguments[1], options)


def _message_for_user(reason: str, inputs: Inputs) -> str | None:
    """Returns an error message for jax errors that the user can fix, and None for other errors."""
    if "host_callbacks" in reason or "custom calls whose targets" in reason:
        call = reason.rpartition("Examples are:")[2].strip()
        return (
            f"The program contains a call that jax cannot export: {shortened(call, 300)} Choose "
            "different kernels, and remove host callbacks."
        )
    if inputs.any_rows:
        return (
            f"The program cannot be exported for any number of rows: {shortened(reason, 300)} Set "
            "a fixed number with --batch=ROWS."
        )
    return None


def _check_platforms(platforms: Sequence[str]) -> list[str]:
    """Returns the platforms to export for, without duplicates."""
    default = export.default_export_platform()
    for platform in platforms:
        require_choice("--platforms", platform, PLATFORMS)
    if default != "cpu" and not set(platforms) <= {default}:
        raise ConfigError(
            f"--platforms is {','.join(platforms)}; expected only {default}, because layers choose "
            f"kernels for {default} on this machine. To export for several platforms, set "
            "JAX_PLATFORMS=cpu in the environment."
        )
    return list(dict.fromkeys(platforms)) or [default]


def _with_shardings(inputs: Inputs, mesh: Mesh) -> Specs:
    """Adds a sharding to each input.

    The rows are sharded over all devices if their number is divisible by the number of devices.
    Otherwise, the input is replicated. A symbolic number of rows is always divisible.
    """
    any_rows = export.symbolic_shape(f"{mesh.size}*{ANY_ROWS}") if inputs.any_rows else ()

    def with_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*any_rows, *x.shape[len(any_rows) :]) if x.shape else ()
        is_split = bool(shape) and shape[0] % mesh.size == 0
        spec = batch_spec(len(shape), mesh.axis_names) if is_split else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return {name: with_sharding(x) for name, x in inputs.specs.items()}


def _pad_and_split(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Pads an input's rows to a multiple of the number of devices and shards them."""
    if x.ndim == 0 or x.shape[0] % mesh.size == 0:
        return x
    x = jnp.pad(x, [(0, -x.shape[0] % mesh.size), *[(0, 0)] * (x.ndim - 1)])
    sharding = NamedSharding(mesh, batch_spec(x.ndim, mesh.axis_names))
    # The barrier hides the padding from XLA, which then compiles the same program as for a padded
    # argument. This makes outputs bitwise equal to the job's.
    return jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(x, sharding))


def _decode_function(
    partitioner: Partitioner, inputs: Inputs
) -> tuple[StateLayout, ProgramFunction]:
    step = partitioner.decode_step
    step.check_batch(dict(inputs.specs))
    function = without_xla_errors(step.function)

    def decode(mdl_vars: Any, batch: GlobalBatch, key: jax.Array | None) -> Any:
        assert key is not None  # `KEY` is an input of the exported decode step.
        return function(mdl_vars, batch, jax.random.wrap_key_data(key))

    return step.layout, decode


def _forward_function(
    partitioner: Partitioner, inputs: Inputs
) -> tuple[StateLayout, ProgramFunction]:
    specs = dict(inputs.specs)
    _, rest = arrays_of((specs,), {}) if takes_batches(partitioner.task) else arrays_of((), specs)
    function = forward_on_the_mesh(partitioner)

    def predict(mdl_vars: Any, batch: GlobalBatch, key: jax.Array | None) -> Any:
        arrays = [batch.inputs[name] for name in sorted(specs)]
        return function(mdl_vars, GlobalBatch(arrays, batch.num_rows), rest)

    return partitioner.layout.select("mdl_vars"), predict
