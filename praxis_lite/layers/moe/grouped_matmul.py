"""Grouped matmuls, which multiply each row by its expert's matrix, and the choice of a kernel."""

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

# R rows, L experts, K input dims, N output dims.
EXPERT_KERNELS = ("auto", "ragged_dot", "megablox", "tokamax")
_SETTING = "TransformerFeedForwardMoe.expert_kernel"
_SUBLANES = 16  # Rows per tile for 16-bit dtypes.


class Workload(NamedTuple):
    """Properties of a matmul that determine which kernels support it.

    Attributes:
      platform: Platform to compile for.
      dtype: Dtype of the operands.
      varying: Manual axes over which the operands vary; Pallas kernels do not support varying
        operands.
    """

    platform: str
    dtype: Any
    varying: frozenset[str]


def check_kernel(setting: str) -> None:
    """Checks that the name of a kernel is valid and that the kernel is installed.

    Raises:
      ConfigError: The name is not valid, or the kernel is not installed.
    """
    require_choice(_SETTING, setting, EXPERT_KERNELS)
    if setting == "tokamax":
        require_package("tokamax", f"{_SETTING} = 'tokamax'")


def choose_kernel(setting: str, work: Workload) -> tuple[str, str]:
    """Returns the name of the kernel to use, and the reason for the choice.

    "auto" selects JAX's megablox on TPU if it supports the matmul, and `jax.lax.ragged_dot`
    otherwise. On other platforms, megablox and tokamax's kernel are interpreted, which is slow.

    Raises:
      ConfigError: The kernel does not support the matmul. The message suggests another kernel.
    """
    check_kernel(setting)
    obstacle = _obstacle("megablox" if setting == "auto" else setting, work)
    if setting == "auto":
        if work.platform != "tpu":
            return "ragged_dot", f"the default on {work.platform}"
        return ("ragged_dot", obstacle) if obstacle else ("megablox", "the default on tpu")
    if obstacle:
        raise ConfigError(f"{_SETTING} is {setting!r}, but {obstacle}. Choose 'ragged_dot'.")
    return setting, "set by the user"


def _obstacle(name: str, work: Workload) -> str | None:
    """Returns the reason why a kernel cannot be used, or None if it can."""
    dtype = jnp.dtype(work.dtype).name
    if name == "ragged_dot":
        return None
    if dtype not in ("bfloat16", "float32"):
        return f"{name} supports bfloat16 and float32, not {dtype}"
    if work.varying:
        axes = ", ".join(sorted(work.varying))
        return f"{name} does not support a jax.shard_map (over {axes}) with check_vma=True"
    return None


def grouped_matmul(
    setting: str, x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, expected_rows: int
) -> jax.Array:
    """Multiplies each row by its expert's matrix, [R, N]; zeros for rows without an expert.

    Args:
      setting: A name in EXPERT_KERNELS.
      x_RK: Rows sorted by expert, followed by rows without an expert.
      w_LKN: The experts' matrices.
      rows_of_expert_L: Number of rows per expert, int32.
      expected_rows: Expected number of rows with an expert, for the cost in `praxis plan`.
    """
    work = Workload(compiled_platform(), x_RK.dtype, varying_axes((x_RK, w_LKN)))
    name, reason = choose_kernel(setting, work)
    log_choice(name, reason)
    if name == "ragged_dot":
        return jax.lax.ragged_dot(x_RK, w_LKN, rows_of_expert_L)
    call = _Call(name, expected_rows / x_RK.shape[0], work.platform != "tpu")
    return _megablox(x_RK, w_LKN, rows_of_expert_L, call)


class _Call(NamedTuple):
    """Static arguments of a call to a megablox kernel.

    Attributes:
      name: Library that provides the kernel: "megablox" or "tokamax".
      share: Fraction of rows that have an expert.
      interpret: Whether Pallas interprets the kernel.
    """

    name: str
    share: float
    interpret: bool

    def kernels(self) -> Any:
        """Returns a module with `gmm` and `tgmm`."""
        if self.name == "tokamax":
            return grouped_tokamax
        # Imported here, because importing Pallas is slow and only TPUs need it.
        return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _megablox(
    x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, call: _Call
) -> jax.Array:
    """Implements `grouped_matmul` with a Pallas kernel, which skips tiles without rows."""
    return _rows_by_experts(x_RK, w_LKN, rows_of_expert_L, call, transposed=False)


def _forward(x_RK, w_LKN, rows_of_expert_L, call) -> tuple[jax.Array, tuple]:
    y_RN = _megablox(x_RK, w_LKN, rows_of_expert_L, call)
    return y_RN, (x_RK, w_LKN, rows_of_expert_L)


def _backward(call: _Call, saved: tuple, grad_RN: jax.Array) -> tuple:
    x_RK, w_LKN, rows_of_expert_L = saved
    grad_x = _rows_by_experts(grad_RN, w_LKN, rows_of_expert_L, call, transposed=True)
    x_RK, grad_RN = (_in_tiles(x) for x in (x_RK, grad_RN))
    _, K, N = w_LKN.shape
    tile = tiling(x_RK.shape[0], K, N, x_RK.dtype)
    with share_of_blocks(call.share):
        # For each expert, the product of its rows, transposed, with the gradients of these rows.
        grad_w = call.kernels().tgmm(
            x_RK.swapaxes(0, 1),
            grad_RN,
            rows_of_expert_L,
            w_LKN.dtype,
            tile,
            interpret=call.interpret,
        )
    return grad_x, grad_w, None


_megablox.defvjp(_forward, _backward)


def _rows_by_experts(
    x_RK: jax.Array,
    w_LKN: jax.Array,
    rows_of_expert_L: jax.Array,
    call: _Call,
    *,
    transposed: bool,
) -> jax.Array:
    tiles_RK = _in_tiles(x_RK)
    _, K, N = w_LKN.shape
    dims = (N, K) if transposed else (K, N)
    with share_of_blocks(call.share):
        y_RN = call.kernels().gmm(
            tiles_RK,
            w_LKN,
            rows_of_expert_L,
            x_RK.dtype,
            tiling(tiles_RK.shape[0], *dims, x_RK.dtype),
            transpose_rhs=transposed,
            interpret=call.interpret,
        )[: x_RK.shape[0]]
    # The kernel does not write the rows that have no expert.
    has_expert_R = jnp.arange(x_RK.shape[0]) < jnp.sum(rows_of_expert_L)
    return jnp.where(has_expert_R[:, None], y_RN, 0)


def _rows_of_tile(num_rows: int) -> int:
    return min(512, -(-num_rows // _SUBLANES) * _SUBLANES)


def _in_tiles(x_RK: jax.Array) -> jax.Array:
    """Pads the rows to a multiple of the tile size; other dims need no padding."""
    rows = _rows_of_tile(x_RK.shape[0])
    return pad_to(x_RK, -(-x_RK.shape[0] // rows) * rows)


def tiling(num_rows: int, K: int, N: int, dtype: Any) -> tuple[int, int, int]:
    """Returns tile sizes (rows, inputs, outputs) that fit a TPU's vector memory of 16 MB."""
    max_size = 1024 if jnp.dtype(dtype).itemsize == 2 else 512
    return _rows_of_tile(num_rows), min(max_size, K), min(max_size, N)


@functools.cache
def log_choice(name: str, reason: str) -> None:
    """Logs the chosen kernel and the reason, once per process for each choice."""
    logging.getLogger(__name__).info("experts use the %s kernel: %s", name, reason)
