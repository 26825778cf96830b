"""The matmul flops in kernels, whose insides the text of a program does not show."""

import math
import re
from collections.abc import Mapping

from praxis_lite.layers.base.foreign_kernels import SHARE_OF_BLOCKS
from praxis_lite.tools.explain.hlo_text import Instruction, arrays_of

_SPLASH = {"_dq": (3, 2), "_dkv": (4, 2), "_fwd": (2, 2)}  # Matmuls, and those of the model.
_CUDNN = "__cudnn$fmha"
_MEGABLOX = re.compile(r"\bt?gmm\b")


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
    and dv, of the blocks that are computed, whose share the layer writes into the text. cuDNN: two
    forward and five backward, of the pairs that are in a causal mask or its window. Megablox: the
    rows that are someone's if loads are even, whose share the layer writes into the text.

    Args:
      of_model: True: without what the backward pass makes again: the logits, in all kernels, and
        the gradient of the probabilities, in splash's second.
    """
    if _CUDNN in one.attributes:
        return _cudnn_flops(one, around, of_model)
    text = one.name + one.attributes[-20_000:]
    matmuls = next(
        (number[of_model] for name, number in _SPLASH.items() if f"splash_mha{name}" in text), 0
    )
    floats = _floats(one, around)
    wide = [dims for dims in floats if len(dims) in (3, 4)]
    if matmuls and len(wide) >= 2:
        q, k = wide[0], wide[1]
        flops = 2 * matmuls * math.prod(q) * k[-2]
    elif _MEGABLOX.search(text) and floats:
        # Rows [R, K] by [L, K, N] to [R, N], or by [R, N] to [L, K, N].
        flops = 2 * math.prod(floats[0]) * arrays_of(one.shape)[0].dims[-1]
    else:
        return 0
    share = re.search(rf'{SHARE_OF_BLOCKS}="([\d.]+)"', one.attributes)
    return int(flops * float(share.group(1) if share else 1.0))


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
