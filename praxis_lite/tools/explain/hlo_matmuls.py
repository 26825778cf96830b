"""Matmuls of a compiled program on a device: their flops and types, read from its text."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from praxis_lite.tools.explain.hlo_runs import executed
from praxis_lite.tools.explain.hlo_text import Instruction, arrays_of, braced, parse

if TYPE_CHECKING:
    import jax


def flops(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the matmul flops of a run on a device: 2 x multiplications in dots, convolutions.

    Branches count as taken, a loop of unknown trip count as one pass. Not counted:
    elementwise work, dots that XLA made a multiply and a sum, other custom calls.
    """
    return sum(
        site.count * matmul_flops(site.instruction, site.computation)
        for site in executed(parse(compiled))
    )


def matmul_flops(one: Instruction, around: Mapping[str, Instruction]) -> int:
    """Returns the flops of a dot, a convolution or a cuBLAS call of a computation, or 0."""
    opcode, attributes = one.opcode, one.attributes
    cublas = opcode == "custom-call" and 'target="__cublas$' in attributes
    if opcode not in ("dot", "convolution") and not cublas:
        return 0
    dims = [arrays_of(around[name].shape)[0].dims for name in one.operands]
    result = arrays_of(one.shape)[0].dims  # cuBLAS's workspace is a second array.
    if opcode == "convolution":
        return _convolution_flops(dims[0], dims[1], result, attributes)
    key = r'"lhs_contracting_dimensions":\[(.*?)\]' if cublas else r"lhs_contracting_dims={(.*?)}"
    contracting = re.search(key, attributes)
    over = re.findall(r"\d+", contracting.group(1)) if contracting else []
    return 2 * math.prod(result) * math.prod(dims[0][int(dim)] for dim in over)


def matmul_type(one: Instruction, around: Mapping[str, Instruction]) -> str:
    """Returns the element type in which a matmul multiplies: its operands', the wider of two."""
    arrays = [arrays_of(around[name].shape)[0] for name in one.operands[:2]]
    return max(arrays, key=lambda array: array.bits).dtype


def _convolution_flops(
    lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int], attributes: str
) -> int:
    # A TPU's dots are convolutions too, their batch dims dilated windows: only where a window
    # meets an element, neither padding nor a hole, is there a multiplication.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None, f"convolution without dim_labels: {attributes}"
    lhs, rhs, result = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), (lhs, rhs, result), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([-\w]+)", braced(attributes, "window=")))
    total = result["b"] * result["f"] * rhs["i"]
    for dim in sorted(lhs.keys() - {"b", "f"}):
        at = {key: values.split("x")[int(dim)] for key, values in window.items()}
        stride, hole, spread = (int(at.get(k, 1)) for k in ("stride", "lhs_dilate", "rhs_dilate"))
        pad = int(at.get("pad", "0_0").split("_")[0])
        total *= window_hits(lhs[dim], rhs[dim], result[dim], stride, pad, hole, spread)
    return 2 * total


@lru_cache(maxsize=1024)
def window_hits(
    size: int, window: int, outputs: int, stride: int, pad: int, hole: int, spread: int
) -> int:
    """Returns along a spatial dim of a convolution how often a window meets an element.

    Args:
      size, window, outputs: of the input, the window, the result.
      stride, pad, hole, spread: the window's stride, the padding before the input, and the dilation
        of input and window.
    """
    # Of the outputs j, j * stride + first is an element's place: every period-th of a range.
    common = math.gcd(stride, hole)
    period = hole // common
    inverse, hits = pow(stride // common, -1, period), 0
    for first in range(-pad, window * spread - pad, spread):
        if first % common == 0:
            begin = max(0, -(first // stride))
            end = min(outputs, ((size - 1) * hole - first) // stride + 1)
            begin += (-first // common * inverse - begin) % period
            hits += max(0, -((begin - end) // period))
    return hits
