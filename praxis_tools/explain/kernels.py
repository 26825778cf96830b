"""Computes the matmul flops of custom kernels, because HLO text does not contain them.

The known kernels are splash attention (JAX and tokamax), cuDNN attention, and megablox (the grouped
matmul in JAX and tokamax).
"""

import math
import re
from typing import NamedTuple

import jax.numpy as jnp

from praxis_lite.layers.base.foreign_kernels import SHARE_OF_BLOCKS
from praxis_lite.layers.moe.grouped_matmul import tiling
from praxis_tools.explain.hlo_text import Computation, Instruction, arrays_of

# Maps the suffix of a splash kernel's name to (number of matmuls that the kernel computes, number
# of matmuls excluding recomputation).
_SPLASH_MATMULS = {"_dq": (3, 2), "_dkv": (4, 2), "_fwd": (2, 2)}
_FUSED_BACKWARD_MATMULS = (5, 4)  # For tokamax's dkv kernel, which also computes dq.
_CUDNN = "__cudnn$fmha"
_MEGABLOX = re.compile(r"\bt?gmm(_megablox\w*)?\b")  # The names in JAX and in tokamax.
_DTYPES = {"bf16": jnp.dtype("bfloat16"), "f32": jnp.dtype("float32")}  # Supported by megablox.


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction is a Pallas kernel on TPU or a cuDNN attention kernel."""
    return "tpu_custom_call" in instruction.attributes or _CUDNN in instruction.attributes


def dims_per_head(instruction: Instruction, computation: Computation) -> int | None:
    """Returns the head dim of a splash attention kernel, or None for other kernels."""
    if _splash_matmuls(instruction) is None:
        return None
    queries = [dims for dims in _float_operands(instruction, computation) if len(dims) in (3, 4)]
    return queries[0][-1] if queries else None


def kernel_flops(
    instruction: Instruction, computation: Computation, *, of_model: bool = False
) -> int:
    """Returns the matmul flops of a known kernel, or 0 for unknown kernels.

    For attention with q [B, N, T, K] and k [B, G, S, K], splash computes two matmuls in the forward
    pass, three for dq, and four for dk and dv (tokamax: five for dq, dk and dv), over the blocks
    that are not skipped. cuDNN computes two matmuls in the forward pass and five in the backward
    pass, over the pairs within the causal mask or window. For megablox, this counts all rows that
    belong to an expert if loads are even. Layers write the share of computed blocks or rows into
    the program's text.

    Args:
      instruction: The kernel.
      computation: Computation that contains the kernel.
      of_model: Whether to exclude matmuls that the backward pass recomputes: the logits in all
        kernels, and the gradient of the probabilities in the second of splash's two backward
        kernels.
    """
    if _CUDNN in instruction.attributes:
        return _cudnn_flops(instruction, computation, of_model)
    floats = _float_operands(instruction, computation)
    queries_and_keys = [dims for dims in floats if len(dims) in (3, 4)]
    matmuls = _splash_matmuls(instruction)
    if matmuls and len(queries_and_keys) >= 2:
        q, k = queries_and_keys[:2]
        # tokamax's dkv kernel returns parts of dq in an array with one more dim, to sum afterwards.
        if any(len(array.dims) == len(q) + 1 for array in arrays_of(instruction.shape)):
            matmuls = _FUSED_BACKWARD_MATMULS
        flops = 2 * matmuls[of_model] * math.prod(q) * k[-2]
    elif _is_megablox(instruction) and floats:
        # Rows [R, K] by [L, K, N] to [R, N], or by [R, N] to [L, K, N].
        flops = 2 * math.prod(floats[0]) * arrays_of(instruction.shape)[0].dims[-1]
    else:
        return 0
    return int(flops * _share_of_blocks(instruction))


class Tiles(NamedTuple):
    """The number of tiles that a kernel processes, and the flops and bytes of each tile."""

    num_tiles: float
    flops: int
    bytes: int


def tiles_of_experts(instruction: Instruction, computation: Computation) -> Tiles | None:
    """Returns the tiles that a megablox kernel processes, or None for other kernels.

    A tile whose rows belong to two experts is processed twice. Tiles that extend beyond the inputs
    or outputs are counted in full.
    """
    floats = _float_operands(instruction, computation)
    ranks = [len(dims) for dims in floats[:2]]
    if not _is_megablox(instruction) or ranks not in ([2, 3], [2, 2]):
        return None
    output = arrays_of(instruction.shape)[0]
    (num_rows, K), N = floats[0], output.dims[-1]
    tile_rows, tile_inputs, tile_outputs = tiling(num_rows, K, N, _DTYPES[output.dtype])
    # Rows [R, K] by [L, K, N], or by [R, N] to [L, K, N]: the array of rank 3 has the experts dim.
    num_experts = next(dims[0] for dims in (*floats, output.dims) if len(dims) == 3)
    row_tiles = math.ceil(num_rows / tile_rows) + num_experts - 1
    input_tiles, output_tiles = math.ceil(K / tile_inputs), math.ceil(N / tile_outputs)
    # Operands that stay in VMEM between tiles are not read again: an expert's weights (if K is not
    # split into tiles), and the accumulated gradient of weights.
    other = tile_outputs * (tile_inputs if input_tiles > 1 else 0)
    if len(output.dims) == 3:
        other = tile_rows * tile_outputs
    return Tiles(
        num_tiles=row_tiles * _share_of_blocks(instruction) * input_tiles * output_tiles,
        flops=2 * tile_rows * tile_inputs * tile_outputs,
        bytes=(tile_rows * tile_inputs + other) * _DTYPES[output.dtype].itemsize,
    )


def _name_and_attributes(instruction: Instruction) -> str:
    # The attributes of a kernel contain its compiled code, followed by names.
    return instruction.name + instruction.attributes[-20_000:]


def _splash_matmuls(instruction: Instruction) -> tuple[int, int] | None:
    text = _name_and_attributes(instruction)
    return next(
        (matmuls for name, matmuls in _SPLASH_MATMULS.items() if f"splash_mha{name}" in text), None
    )


def _is_megablox(instruction: Instruction) -> bool:
    return _MEGABLOX.search(_name_and_attributes(instruction)) is not None


def _float_operands(instruction: Instruction, computation: Computation) -> list[tuple[int, ...]]:
    """Returns the shapes of a kernel's floating-point operands.

    Integer operands are metadata: computed blocks, segment ids, group sizes.
    """
    operands = [
        arrays_of(computation[name].shape) for name in instruction.operands if name in computation
    ]
    return [
        operand[0].dims
        for operand in operands
        if operand and operand[0].dtype in ("bf16", "f16", "f32")
    ]


def _share_of_blocks(instruction: Instruction) -> float:
    share = re.search(rf'{SHARE_OF_BLOCKS}="([\d.]+)"', instruction.attributes)
    return float(share.group(1) if share else 1.0)


def _cudnn_flops(instruction: Instruction, computation: Computation, of_model: bool) -> int:
    attributes = instruction.attributes
    logits = re.search(r'"intermediate_tensor_shape":{"dimensions":\[([^]]*)\]', attributes)
    if logits is None:
        return 0
    rows, heads, num_queries, num_keys = map(int, re.findall(r"\d+", logits[1]))
    pairs = num_queries * num_keys
    # With a causal mask, only these pairs of queries and keys are computed.
    if "CAUSAL" in attributes:
        window = re.search(r'"sliding_window_length":"?(\d+)', attributes)
        widest = int(window[1]) if window and int(window[1]) else num_keys
        pairs = sum(min(query + 1, num_keys, widest) for query in range(num_queries))
    dim = arrays_of(computation[instruction.operands[0]].shape)[0].dims[-1]
    # The kernel's backward pass also recomputes the logits, which are not counted for the model.
    matmuls = (4 if of_model else 5) if "Backward" in attributes else 2
    return 2 * matmuls * rows * heads * pairs * dim
