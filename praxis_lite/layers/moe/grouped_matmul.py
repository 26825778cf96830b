"""Rows times the matrix of the expert that each belongs to: by which kernel, and why."""

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.collectives.varying import varying_axes
from praxis_lite.core.errors import ConfigError, require_choice
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.layers.base.base_layer import filled_up
from praxis_lite.layers.base.foreign_kernels import share_of_blocks

# R rows, L experts, K dims of inputs, N dims of outputs.
EXPERT_KERNELS = ("auto", "ragged_dot", "megablox")
_SETTING = "TransformerFeedForwardMoe.expert_kernel"
_SUBLANES = 16  # Rows of a tile of 16-bit values.


class Workload(NamedTuple):
    """What a product is of, and where: the platform, and axes of a `shard_map` that checks types.

    `varying` are the mesh axes that its arrays are known to differ along; Pallas's kernels do not
    say of theirs.
    """

    platform: str
    dtype: Any
    varying: frozenset[str]


def choose_kernel(setting: str, work: Workload) -> tuple[str, str]:
    """Returns the kernel's name and the reason for it, as a sentence's end.

    "auto" is megablox on a TPU where it can do the product, otherwise `jax.lax.ragged_dot`. Where
    megablox is set, other platforms interpret it, which is slow.

    Raises:
      ConfigError: the kernel that is set cannot do it; says which can.
    """
    require_choice(_SETTING, setting, EXPERT_KERNELS)
    obstacle = _obstacle(work)
    if setting == "auto":
        if work.platform != "tpu":
            return "ragged_dot", f"the usual one on a {work.platform}"
        return ("ragged_dot", obstacle) if obstacle else ("megablox", "it is the tpu's own")
    if setting == "megablox" and obstacle:
        raise ConfigError(f"{_SETTING} is 'megablox', but {obstacle}. Choose 'ragged_dot'.")
    return setting, "it is set"


def _obstacle(work: Workload) -> str | None:
    """Returns why megablox cannot run, or None if it can."""
    name = jnp.dtype(work.dtype).name
    if name not in ("bfloat16", "float32"):
        return f"megablox takes bfloat16 or float32, not {name}"
    if work.varying:
        axes = ", ".join(sorted(work.varying))
        return f"megablox cannot run where JAX checks what varies along {axes}"
    return None


def grouped_matmul(
    setting: str, x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, expected_rows: int
) -> jax.Array:
    """Returns each row times its expert's matrix, [R, N]; zeros for rows that are no one's.

    Args:
      setting: a name in EXPERT_KERNELS.
      x_RK: rows sorted by expert; those behind the last expert's are no one's.
      rows_of_expert_L: int32, their numbers.
      expected_rows: that are someone's, for plans: a program does not know before it runs.
    """
    work = Workload(compiled_platform(), x_RK.dtype, varying_axes((x_RK, w_LKN)))
    name, reason = choose_kernel(setting, work)
    log_choice(name, reason)
    if name == "ragged_dot":
        return jax.lax.ragged_dot(x_RK, w_LKN, rows_of_expert_L)
    return _megablox(
        x_RK, w_LKN, rows_of_expert_L, expected_rows / x_RK.shape[0], work.platform != "tpu"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _megablox(
    x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, share: float, interpret: bool
) -> jax.Array:
    """Returns `grouped_matmul` by Pallas's kernel, whose tiles without rows are not computed."""
    return _rows_by_experts(x_RK, w_LKN, rows_of_expert_L, share, interpret, transposed=False)


def _forward(x_RK, w_LKN, rows_of_expert_L, share, interpret) -> tuple[jax.Array, tuple]:
    y_RN = _megablox(x_RK, w_LKN, rows_of_expert_L, share, interpret)
    return y_RN, (x_RK, w_LKN, rows_of_expert_L)


def _backward(share: float, interpret: bool, saved: tuple, grad_RN: jax.Array) -> tuple:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x_RK, w_LKN, rows_of_expert_L = saved
    grad_x = _rows_by_experts(grad_RN, w_LKN, rows_of_expert_L, share, interpret, transposed=True)
    x_RK, grad_RN = (_in_tiles(x) for x in (x_RK, grad_RN))
    tile = tiling(x_RK.shape[0], *w_LKN.shape[1:], x_RK.dtype)
    with share_of_blocks(share):
        grad_w = tgmm(
            x_RK.swapaxes(0, 1), grad_RN, rows_of_expert_L, w_LKN.dtype, tile,
            interpret=interpret,
        )
    return grad_x, grad_w, None


_megablox.defvjp(_forward, _backward)


def _rows_by_experts(
    x_RK: jax.Array, w_LKN: jax.Array, rows_of_expert_L: jax.Array, share: float, interpret: bool,
    *, transposed: bool,
) -> jax.Array:
    # Imported here: Pallas takes a while to import, and only a TPU needs it.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles_RK = _in_tiles(x_RK)
    dims = w_LKN.shape[:0:-1] if transposed else w_LKN.shape[1:]
    with share_of_blocks(share):
        y_RN = gmm(
            tiles_RK, w_LKN, rows_of_expert_L, x_RK.dtype,
            tiling(tiles_RK.shape[0], *dims, x_RK.dtype),
            transpose_rhs=transposed, interpret=interpret,
        )[: x_RK.shape[0]]
    # It leaves rows that are no one's as the memory was.
    is_someones_R = jnp.arange(x_RK.shape[0]) < jnp.sum(rows_of_expert_L)
    return jnp.where(is_someones_R[:, None], y_RN, 0)


def _rows_of_tile(num_rows: int) -> int:
    return min(512, -(-num_rows // _SUBLANES) * _SUBLANES)


def _in_tiles(x_RK: jax.Array) -> jax.Array:
    """Returns rows filled up to whole tiles; the kernel's other dims need not divide."""
    rows = _rows_of_tile(x_RK.shape[0])
    return filled_up(x_RK, -(-x_RK.shape[0] // rows) * rows)


def tiling(num_rows: int, K: int, N: int, dtype: Any) -> tuple[int, int, int]:
    """Returns the tile, of rows, inputs and outputs, that fits a TPU's vector memory of 16 MB."""
    most = 1024 if jnp.dtype(dtype).itemsize == 2 else 512
    return _rows_of_tile(num_rows), min(most, K), min(most, N)


@functools.cache
def log_choice(name: str, reason: str) -> None:
    """Logs which kernel was chosen and why: each choice once in a process."""
    logging.getLogger("praxis_lite").info("experts by the %s kernel: %s", name, reason)
