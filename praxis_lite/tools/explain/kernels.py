"""The matmul flops in kernels, whose insides the text of a program does not show."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from praxis_lite.layers.base.foreign_kernels import SHARE_OF_BLOCKS
from praxis_lite.layers.moe.grouped_matmul import tiling
from praxis_lite.tools.explain.hlo_text import Instruction, arrays_of

_SPLASH = {"_dq": (3, 2), "_dkv": (4, 2), "_fwd": (2, 2)}  # Matmuls, and those of the model.
_FUSED = (5, 4)  # The same of a kernel of dk and dv that gives dq too: tokamax's.
_CUDNN = "__cudnn$fmha"
_DTYPES = {"bf16": jnp.dtype("bfloat16"), "f32": jnp.dtype("float32")}  # That megablox takes.
_MEGABLOX = re.compile(r"\bt?gmm(_megablox\w*)?\b")  # JAX's, or tokamax's.


def is_kernel(one: Instruction) -> bool:
    """Returns True for a kernel of Pallas on a TPU, and for cuDNN's attention."""
    return "tpu_custom_call" in one.attributes or _CUDNN in one.attributes


def dims_per_head(one: Instruction, around: Mapping[str, Instruction]) -> int | None:
    """Returns the dims of a head of splash's queries, or None of another kernel."""
    text = one.name + one.attributes[-20_000:]
    if not any(f"splash_mha{name}" in text for name in _SPLASH):
        return None
    wide = [dims for dims in _floats(one, around) if len(dims) in (3, 4)]
    return wide[0][-1] if wide else None


def _floats(one: Instruction, around: Mapping[str, Instruction]) -> list[tuple[int, ...]]:
    """Returns the dims of a kernel's operands that are no integers.

    Integers say which blocks are computed, and of which segments or experts tokens are.
    """
    operands = [arrays_of(around[name].shape) for name in one.operands if name in around]
    return [
        operand[0].dims for operand in operands
        if operand and operand[0].dtype in ("bf16", "f16", "f32")
    ]


def kernel_flops(
    one: Instruction, around: Mapping[str, Instruction], *, of_model: bool = False
) -> int:
    """Returns the matmul flops of splash, cuDNN's attention or megablox, or 0 of another kernel.

    Of q [B, N, T, K] against [B, G, S, K]. Splash: two matmuls forward, three for dq, four for dk
    and dv, or five for all three (tokamax's), of the blocks that are computed, whose share the
    layer writes into the text. cuDNN: two forward and five backward, of the pairs that are in a
    causal mask or its window. Megablox, JAX's or tokamax's: the rows that are someone's if loads
    are even, whose share the layer writes into the text.

    Args:
      of_model: True: without what the backward pass makes again: the logits, in all kernels, and
        the gradient of the probabilities, in splash's second where it has two.
    """
    if _CUDNN in one.attributes:
        return _cudnn_flops(one, around, of_model)
    text = one.name + one.attributes[-20_000:]
    matmuls = next(
        (number for name, number in _SPLASH.items() if f"splash_mha{name}" in text), None
    )
    floats = _floats(one, around)
    wide = [dims for dims in floats if len(dims) in (3, 4)]
    if matmuls and len(wide) >= 2:
        q, k = wide[0], wide[1]
        # Its dq comes in several parts, which are added behind it: an array of one dim more.
        if any(len(array.dims) == len(q) + 1 for array in arrays_of(one.shape)):
            matmuls = _FUSED
        flops = 2 * matmuls[of_model] * math.prod(q) * k[-2]
    elif _MEGABLOX.search(text) and floats:
        # Rows [R, K] by [L, K, N] to [R, N], or by [R, N] to [L, K, N].
        flops = 2 * math.prod(floats[0]) * arrays_of(one.shape)[0].dims[-1]
    else:
        return 0
    return int(flops * _share_of_blocks(one))


def _share_of_blocks(one: Instruction) -> float:
    share = re.search(rf'{SHARE_OF_BLOCKS}="([\d.]+)"', one.attributes)
    return float(share.group(1) if share else 1.0)


class Tiles(NamedTuple):
    """The tiles of a kernel: how many it works on, and the flops and bytes of each."""

    count: float
    flops: int
    bytes: int


def tiles_of_experts(one: Instruction, around: Mapping[str, Instruction]) -> Tiles | None:
    """Returns the tiles that megablox multiplies, or None of another kernel.

    A tile of rows in which one expert's end and another's begin is worked on once for each. Tiles
    that reach over the ends of inputs and outputs are multiplied whole.
    """
    text = one.name + one.attributes[-20_000:]
    floats = _floats(one, around)
    if not _MEGABLOX.search(text) or [len(dims) for dims in floats[:2]] not in ([2, 3], [2, 2]):
        return None
    result = arrays_of(one.shape)[0]
    (num_rows, K), N = floats[0], result.dims[-1]
    of_rows, of_inputs, of_outputs = tiling(num_rows, K, N, _DTYPES[result.dtype])
    # Rows [R, K] by [L, K, N], or by [R, N] to [L, K, N]: which of these has the experts.
    num_experts = next(dims[0] for dims in (*floats, result.dims) if len(dims) == 3)
    count = (math.ceil(num_rows / of_rows) + num_experts - 1) * _share_of_blocks(one)
    in_depth, in_width = math.ceil(K / of_inputs), math.ceil(N / of_outputs)
    # What stays in the kernel's memory from one tile to the next is not read again: of weights a
    # matrix that is not cut, of their gradients the sum.
    other = of_outputs * (of_inputs if in_depth > 1 else 0)
    if len(result.dims) == 3:
        other = of_rows * of_outputs
    return Tiles(
        count * in_depth * in_width, 2 * of_rows * of_inputs * of_outputs,
        (of_rows * of_inputs + other) * _DTYPES[result.dtype].itemsize,
    )


def _cudnn_flops(one: Instruction, around: Mapping[str, Instruction], of_model: bool) -> int:
    logits = re.search(r'"intermediate_tensor_shape":{"dimensions":\[([^]]*)\]', one.attributes)
    if logits is None:
        return 0
    rows, heads, num_queries, num_keys = map(int, re.findall(r"\d+", logits[1]))
    pairs = num_queries * num_keys
    if "CAUSAL" in one.attributes:
        window = re.search(r'"sliding_window_length":"?(\d+)', one.attributes)
        widest = int(window[1]) if window and int(window[1]) else num_keys
        pairs = sum(min(query + 1, num_keys, widest) for query in range(num_queries))
    dim = arrays_of(around[one.operands[0]].shape)[0].dims[-1]
    matmuls = (4 if of_model else 5) if "Backward" in one.attributes else 2
    return 2 * matmuls * rows * heads * pairs * dim
