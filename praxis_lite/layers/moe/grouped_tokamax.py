"""Tokamax's megablox kernels for grouped matmuls, with the signatures of JAX's."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax

from praxis_lite.layers.base.tokamax_internals import grouped_matmul_kernels

# R rows, L experts, K input dims, N output dims.
_Tile = tuple[int, int, int]


def gmm(
    x_RK: jax.Array,
    w_LKN: jax.Array,
    rows_of_expert_L: jax.Array,
    dtype: Any,
    tile: _Tile,
    *,
    transpose_rhs: bool,
    interpret: bool,
) -> jax.Array:
    """Multiplies each row by its expert's matrix, [R, N], like JAX's gmm."""
    dims = w_LKN.shape[:0:-1] if transpose_rhs else w_LKN.shape[1:]
    operands = x_RK, w_LKN, rows_of_expert_L
    return _run("gmm", operands, dtype, tile, dims, interpret, transpose_rhs=transpose_rhs)


def tgmm(
    x_KR: jax.Array,
    grad_RN: jax.Array,
    rows_of_expert_L: jax.Array,
    dtype: Any,
    tile: _Tile,
    *,
    interpret: bool,
) -> jax.Array:
    """Returns the gradients of the experts' matrices, [L, K, N], like JAX's tgmm."""
    dims = x_KR.shape[0], grad_RN.shape[1]
    return _run("tgmm", (x_KR, grad_RN, rows_of_expert_L), dtype, tile, dims, interpret)


def _run(
    kernel: str,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    dtype: Any,
    tile: _Tile,
    dims: tuple[int, ...],
    interpret: bool,
    **settings: Any,
) -> jax.Array:
    # The kernel handles partial tiles with slices of dynamic size, which the interpreter does not
    # support.
    tiling = (tile[0], *dims) if interpret else tile
    with _tpu_to_interpret() if interpret else contextlib.nullcontext():
        return getattr(grouped_matmul_kernels(), kernel)(
            *operands,
            precision=None,
            out_dtype=dtype,
            tiling=tiling,
            interpret=interpret,
            **settings,
        )


@contextlib.contextmanager
def _tpu_to_interpret() -> Iterator[None]:
    """Registers this platform's devices as TPU v5e inside the `with` block.

    The kernel queries the memory layout of a TPU, even in interpret mode.
    """
    from jax.experimental.pallas import tpu as pltpu

    # Pallas's registry of device kinds is in the module of a cached function, whose name differs in
    # jax 0.12.
    names = inspect.unwrap(pltpu.get_tpu_info).__globals__
    kind, registry = names["get_device_kind"](), names["registry"]
    registry[kind] = lambda: pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
    try:
        yield
    finally:
        registry.pop(kind, None)
