"""Which options XLA compiles steps with."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.mesh_config import TPUS, CompilerOptions

_PLATFORM_OF = {"cuda": "gpu", "rocm": "gpu"}
# On TPU: no sums in place of products with one row, which read its memory at a third of its speed.
DECODING = {"xla_tpu_enable_dot_strength_reduction": False}
# On TPU: gradients of weights that lie whole are summed over devices once, after the loops over
# layers and micro-batches, and not in their every turn. The bytes may be as many as they are.
ACCUMULATING = {"xla_while_loop_all_reduce_dus_code_motion_max_size_bytes": 2**40}


def init_options(mesh: Mesh) -> dict[str, Any] | None:
    """Returns compiler options under which init, which runs once, compiles fast.

    On CPU LLVM then takes 0.05 s for a random draw, not 0.5. At level 0 shards would round apart.
    """
    return {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None


def step_options(options: CompilerOptions | None, mesh: Mesh) -> dict[str, Any] | None:
    """Returns those of the mesh's devices, for `jax.jit`, or None if there are none.

    Raises:
      ConfigError: a platform has another name, or XLA does not know an option or takes another
        value; nothing large was compiled.
    """
    options = options or {}
    for name in options:
        choices = ("cpu", "gpu", "tpu", *dict.fromkeys(TPUS.values()))
        require_choice("mesh.compiler_options: a platform or kind of TPU", name, choices)
    device = mesh.devices.flat[0]
    platform, kind = device.platform, TPUS.get(device.device_kind.lower(), "")
    chosen = {**options.get(_PLATFORM_OF.get(platform, platform), {}), **options.get(kind, {})}
    if not chosen:
        return None
    whole = NamedSharding(mesh, PartitionSpec())
    try:
        jax.jit(lambda: 0, out_shardings=whole, compiler_options=chosen).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error).partition(": ")[2] or str(error)
        raise ConfigError(
            f"mesh.compiler_options of {kind or platform}: {text.strip().rstrip('.')}. Wanted are "
            "options that XLA has in this version of jaxlib or libtpu, by names without dashes."
        ) from None
    return chosen


def more_options(
    more: dict[str, Any], options: dict[str, Any] | None, mesh: Mesh
) -> dict[str, Any] | None:
    """Returns options of steps, and more of ours for a TPU if its version of XLA has them."""
    try:
        return step_options({"tpu": {**more, **(options or {})}}, mesh) or options
    except ConfigError:
        return options
