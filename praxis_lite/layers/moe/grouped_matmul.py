"""Grouped matmuls, each row times the matrix of its expert, and the choice of a kernel."""

import functools
import importlib
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.core.collectives.varying import varying_axes
from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.host.optional_packages import require_package
from praxis_lite.layers.base.base_layer import pad_to
from praxis_lite.layers.base.foreign_kernels import share_of_blocks
from praxis_lite.layers.moe import grouped_tokamax

__all__ = ("tiling",)

# R rows, L experts, K dims of inputs, N dims of outputs.
EXPERT_KERNELS = ("auto", "ragged_dot", "megablox", "tokamax")
_SETTING = "TransformerFeedForwardMoe.expert_kernel"
_SUBLANES = 16  # Rows of a tile of 16-bit values.


class Workload(NamedTuple):
    """The platform and dtype of a product, and manual axes over which its arrays vary.

    Pallas kernels have no types of values that vary over manual axes.
    """

    platform: str
    dtype: Any
    varying: frozenset[str]


def check_kernel(setting: str) -> None:
    """Checks that a kernel exists and is installed.

    Raises:
      ConfigError: it is not; lists the kernels, or how to install it.
    """
    require_choice(_SETTING, setting, EXPERT_KERNELS)
    if setting == "tokamax":
        require_package("tokamax", f"{_SETTING} = 'tokamax'")


def choose_kernel(setting: str, work: Workload) -> tuple[str, str]:
    """Returns the name of a kernel, and the reason for it.

    "auto" is JAX's megablox on TPU where it supports the product, else `jax.lax.ragged_dot`. Other
    platforms interpret megablox and tokamax's kernel, which is slow.

    Raises:
      ConfigError: the kernel does not support the product; suggests another.
    """
    check_kernel(setting)
    obstacle = _obstacle("megablox" if setting == "auto" else setting, work)
    if setting == "auto":
        if work.platform != "tpu":
            return "ragged_dot", f"the usual one on a {work.platform}"
        return ("ragged_dot", obstacle) if obstacle else ("megablox", "it is the tpu's own")
    if obstacle:
        raise ConfigError(f"{_SETTING} is {setting!r}, but {obstacle}. Choose 'ragged_dot'.")
    return setting, "it is set"


def _obstacle(name: str, work: Workload) -> str | None:
    """Returns why a kernel cannot run, or None."""
    dtype = jnp.dtype(work.dtype).name
    if name == "ragged_dot":
        return None
    if dtype not in ("bfloat16", "float32"):
        return f"{name} takes bfloat16 or float32, not {dtype}"
    if work.varying:
        axes = ", ".join(sorted(work.varying))
        return f"{name} cannot run where JAX checks what varies along {axes}"
    return None


def grouped_matmul(
    setting: str, x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, expected_rows: int
) -> jax.Array:
    """Returns each row times its expert's matrix, [R, N]; zeros for rows without an expert.

    Args:
      setting: a name in EXPERT_KERNELS.
      x_RK: rows sorted by expert; rows after those of the last expert have none.
      rows_of_expert_L: int32, the number of rows of each expert.
      expected_rows: expected number of rows with an expert, for plans.
    """
    work = Workload(compiled_platform(), x_RK.dtype, varying_axes((x_RK, w_LKN)))
    name, reason = choose_kernel(setting, work)
    log_choice(name, reason)
    if name == "ragged_dot":
        return jax.lax.ragged_dot(x_RK, w_LKN, rows_of_expert_L)
    call = _Call(name, expected_rows / x_RK.shape[0], work.platform != "tpu")
    return _megablox(x_RK, w_LKN, rows_of_expert_L, call)


class _Call(NamedTuple):
    """The library of the megablox kernel, the share of rows with an expert, and interpret mode."""

    name: str
    share: float
    interpret: bool

    def kernels(self) -> Any:
        """Returns a module with `gmm` and `tgmm`."""
        if self.name == "tokamax":
            return grouped_tokamax
        # Imported here: Pallas takes a while to import, and only a TPU needs it.
        return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _megablox(
    x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, call: _Call
) -> jax.Array:
    """Returns `grouped_matmul` by a Pallas kernel, which skips tiles without rows."""
    return _rows_by_experts(x_RK, w_LKN, rows_of_expert_L, call, transposed=False)


def _forward(x_RK, w_LKN, rows_of_expert_L, call) -> tuple[jax.Array, tuple]:
    y_RN = _megablox(x_RK, w_LKN, rows_of_expert_L, call)
    return y_RN, (x_RK, w_LKN, rows_of_expert_L)


def _backward(call: _Call, saved: tuple, grad_RN: jax.Array) -> tuple:
    x_RK, w_LKN, rows_of_expert_L = saved
    grad_x = _rows_by_experts(grad_RN, w_LKN, rows_of_expert_L, call, transposed=True)
    x_RK, grad_RN = (_in_tiles(x) for x in (x_RK, grad_RN))
    tile = tiling(x_RK.shape[0], *w_LKN.shape[1:], x_RK.dtype)
    with share_of_blocks(call.share):
        grad_w = call.kernels().tgmm(
            x_RK.swapaxes(0, 1), grad_RN, rows_of_expert_L, w_LKN.dtype, tile,
            interpret=call.interpret,
        )
    return grad_x, grad_w, None


_megablox.defvjp(_forward, _backward)


def _rows_by_experts(
    x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, call: _Call,
    *, transposed: bool,
) -> jax.Array:
    tiles_RK = _in_tiles(x_RK)
    dims = w_LKN.shape[:0:-1] if transposed else w_LKN.shape[1:]
    with share_of_blocks(call.share):
        y_RN = call.kernels().gmm(
            tiles_RK, w_LKN, rows_of_expert_L, x_RK.dtype,
            tiling(tiles_RK.shape[0], *dims, x_RK.dtype),
            transpose_rhs=transposed, interpret=call.interpret,
        )[: x_RK.shape[0]]
    # The kernel does not write rows without an expert.
    is_someones_R = jnp.arange(x_RK.shape[0]) < jnp.sum(rows_of_expert_L)
    return jnp.where(is_someones_R[:, None], y_RN, 0)


def _rows_of_tile(num_rows: int) -> int:
    return min(512, -(-num_rows // _SUBLANES) * _SUBLANES)


def _in_tiles(x_RK: jax.Array) -> jax.Array:
    """Pads rows to a multiple of the tile; other dims need not divide."""
    rows = _rows_of_tile(x_RK.shape[0])
    return pad_to(x_RK, -(-x_RK.shape[0] // rows) * rows)


def tiling(num_rows: int, K: int, N: int, dtype: Any) -> tuple[int, int, int]:
    """Returns the tile, of rows, inputs and outputs, that fits a TPU's vector memory of 16 MB."""
    most = 1024 if jnp.dtype(dtype).itemsize == 2 else 512
    return _rows_of_tile(num_rows), min(most, K), min(most, N)


@functools.cache
def log_choice(name: str, reason: str) -> None:
    """Logs which kernel was chosen and why: each choice once in a process."""
    logging.getLogger("praxis_lite").info("experts by the %s kernel: %s", name, reason)
