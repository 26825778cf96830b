"""XLA options for compiling steps."""

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
# If a name ends in "?" and XLA does not have the option, it is omitted with a warning.
# On TPU, keep matmuls with a single row as matmuls: the reductions that XLA would replace them with
# reach only a third of the memory bandwidth.
DECODING = {"xla_tpu_enable_dot_strength_reduction?": False}
# On TPU, reduce gradients of replicated weights over devices once, after the loops over layers and
# microbatches, instead of in every iteration. The limit is large enough for any weight.
ACCUMULATING = {"xla_while_loop_all_reduce_dus_code_motion_max_size_bytes?": 2**40}


def init_options(mesh: Mesh) -> dict[str, Any] | None:
    """Returns compiler options for init, which runs only once and should therefore compile fast.

    On CPU, optimization level 1 reduces the compile time of a random draw from 0.5 s to 0.05 s.
    Level 0 would round shards differently. All jaxlib versions accept this option, so it is not
    tested.
    """
    return {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None


def step_options(options: CompilerOptions | None, mesh: Mesh) -> dict[str, Any] | None:
    """Returns the compiler options for the devices of a mesh, or None if no options apply.

    Options are tested by compiling a constant with them. If XLA rejects an option whose name ends
    in "?", the option is omitted, and a warning reports XLA's reason. The "?" is removed from the
    returned names.

    Raises:
      ConfigError: A platform is unknown, or XLA rejects an option or its value.
    """
    options = options or {}
    for name in options:
        choices = ("cpu", "gpu", "tpu", *dict.fromkeys(TPUS.values()))
        require_choice("mesh.compiler_options: a platform or TPU type", name, choices)
    device = mesh.devices.flat[0]
    platform, kind = device.platform, TPUS.get(device.device_kind.lower(), "")
    generic_platform = _PLATFORM_OF.get(platform, platform)
    # Options for a TPU type override options for the platform. `may_lack` contains the names that
    # are marked with "?".
    chosen: dict[str, Any] = {}
    may_lack: set[str] = set()
    for name, value in (*options.get(generic_platform, {}).items(), *options.get(kind, {}).items()):
        bare = name.removesuffix("?")
        chosen[bare] = value
        (may_lack.discard if bare == name else may_lack.add)(bare)
    # Test all options together, which usually succeeds. If XLA rejects them, test each to find out
    # why.
    where = f"mesh.compiler_options of {kind or platform}"
    if not chosen or _rejection((*chosen.items(),), mesh) is None:
        return chosen or None
    rejected = {
        name: _sentences(text, mesh)
        for name, value in chosen.items()
        if (text := _rejection(((name, value),), mesh))
    }
    if mistakes := [reason for name, reason in rejected.items() if name not in may_lack]:
        raise ConfigError(f"{where}: {' '.join(mistakes)} Fix mesh.compiler_options.")
    for name, reason in rejected.items():
        warn_once(f"{where}: {name}={chosen.pop(name)} is omitted. {reason}")
    # Options may be valid separately but not together.
    if chosen and (text := _rejection((*chosen.items(),), mesh)):
        raise ConfigError(
            f"{where}: XLA rejects the combination {chosen}: {text}. Remove one of the options."
        )
    return chosen or None


def more_options(
    more: dict[str, Any], options: dict[str, Any] | None, mesh: Mesh
) -> dict[str, Any] | None:
    """Returns `options` plus additional options for TPUs; `options` take precedence."""
    if mesh.devices.flat[0].platform != "tpu":
        return options
    more = {name: x for name, x in more.items() if name.removesuffix("?") not in (options or {})}
    return step_options({"tpu": {**more, **(options or {})}}, mesh)


@functools.cache
def _rejection(options: tuple[tuple[str, Any], ...], mesh: Mesh) -> str | None:
    """Returns XLA's reason for rejecting options, or None if it accepts them."""
    replicated = NamedSharding(mesh, PartitionSpec())
    try:
        constant = jax.jit(lambda: 0, out_shardings=replicated, compiler_options=dict(options))
        constant.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        # Remove the status code before the message.
        text = str(error).partition(": ")[2] or str(error)
        return text.strip().rstrip(".:")
    return None


def _sentences(rejection: str, mesh: Mesh) -> str:
    """Returns XLA's reason for rejecting an option, with a suggestion if its name is unknown."""
    unknown = re.fullmatch(f"{_UNKNOWN}'(.*)'", rejection)
    if not unknown:
        return f"{rejection}."
    package = "libtpu" if mesh.devices.flat[0].platform == "tpu" else "jaxlib"
    return unknown_option_message(
        unknown[1],
        package,
        lambda name: not (_rejection(((name, ""),), mesh) or "").startswith(_UNKNOWN),
    )
