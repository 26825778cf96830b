"""The options that XLA compiles steps with."""

import functools
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError, require_choice, warn_once
from praxis_lite.core.sharding.devices.xla_options import unknown_option_message
from praxis_lite.core.sharding.mesh_config import TPUS, CompilerOptions

_UNKNOWN = "No such compile option: "
_PLATFORM_OF = {"cuda": "gpu", "rocm": "gpu"}
# Where a "?" ends an option's name, XLA may lack it: it is left out then, with a warning.
# On TPU: no sums in place of products with one row, which read its memory at a third of its speed.
DECODING = {"xla_tpu_enable_dot_strength_reduction?": False}
# On TPU: gradients of replicated weights are summed over devices once, after the loops over
# layers and micro-batches, and not in their every turn. The bytes may be as many as they are.
ACCUMULATING = {"xla_while_loop_all_reduce_dus_code_motion_max_size_bytes?": 2**40}


def init_options(mesh: Mesh) -> dict[str, Any] | None:
    """Returns compiler options under which init, which runs once, compiles fast.

    On CPU LLVM then takes 0.05 s for a random draw, not 0.5. At level 0 shards would round apart.
    Each jaxlib has the option, so that nothing is compiled to ask.
    """
    return {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None


def step_options(options: CompilerOptions | None, mesh: Mesh) -> dict[str, Any] | None:
    """Returns those of the mesh's devices, for `jax.jit`, or None if there are none.

    A name that ends in "?" is returned without it, if XLA takes the option; else a warning reports
    that it is left out, and why.

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
    of_platform = _PLATFORM_OF.get(platform, platform)
    chosen, may_lack = {}, set()
    for name, value in (*options.get(of_platform, {}).items(), *options.get(kind, {}).items()):
        bare = name.removesuffix("?")
        chosen[bare] = value
        (may_lack.discard if bare == name else may_lack.add)(bare)
    where = f"mesh.compiler_options of {kind or platform}"
    if not chosen or _refusal((*chosen.items(),), mesh) is None:
        return chosen or None
    refused = {
        name: _sentences(text, mesh) for name, value in chosen.items()
        if (text := _refusal(((name, value),), mesh))
    }
    if mistakes := [said for name, said in refused.items() if name not in may_lack]:
        raise ConfigError(f"{where}: {' '.join(mistakes)} Fix mesh.compiler_options.")
    for name, said in refused.items():
        warn_once(f"{where}: {name}={chosen.pop(name)} is left out. {said}")
    if chosen and (text := _refusal((*chosen.items(),), mesh)):
        raise ConfigError(f"{where}: XLA refuses {chosen} together: {text}. Leave one out.")
    return chosen or None


def more_options(
    more: dict[str, Any], options: dict[str, Any] | None, mesh: Mesh
) -> dict[str, Any] | None:
    """Returns options of steps, and more of ours for a TPU, before which the former count."""
    if mesh.devices.flat[0].platform != "tpu":
        return options
    more = {name: x for name, x in more.items() if name.removesuffix("?") not in (options or {})}
    return step_options({"tpu": {**more, **(options or {})}}, mesh)


@functools.cache
def _refusal(options: tuple[tuple[str, Any], ...], mesh: Mesh) -> str | None:
    """Returns XLA's reason to refuse options, or None if it compiles a constant with them."""
    whole = NamedSharding(mesh, PartitionSpec())
    try:
        jax.jit(lambda: 0, out_shardings=whole, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error).partition(": ")[2] or str(error)
        return text.strip().rstrip(".:")
    return None


def _sentences(refusal: str, mesh: Mesh) -> str:
    """Returns XLA's reason; for an unknown name, with the name to use instead."""
    unknown = re.fullmatch(f"{_UNKNOWN}'(.*)'", refusal)
    if not unknown:
        return f"{refusal}."
    package = "libtpu" if mesh.devices.flat[0].platform == "tpu" else "jaxlib"
    return unknown_option_message(
        unknown[1], package,
        lambda name: not (_refusal(((name, ""),), mesh) or "").startswith(_UNKNOWN),
    )
