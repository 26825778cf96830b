"""Computes the flops per device and the element types of matmuls from HLO text."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from praxis_tools.explain.hlo_runs import executed
from praxis_tools.explain.hlo_text import Computation, Instruction, arrays_of, braced, parse

if TYPE_CHECKING:
    import jax


def flops(compiled: "jax.stages.Compiled | str") -> int:
    """Returns the flops of dots and convolutions in one run of a program on one device.

    A multiply-add is counted as 2 flops. All branches are assumed to be taken, and loops with
    unknown trip counts are assumed to have one iteration. Elementwise operations, dots that XLA
    rewrote as a multiply and a sum, and custom calls other than cuBLAS are not counted.
    """
    return sum(
        site.num_runs * matmul_flops(site.instruction, site.computation)
        for site in executed(parse(compiled))
    )


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """Returns the flops of a dot, convolution or cuBLAS call, or 0 for other instructions."""
    opcode, attributes = instruction.opcode, instruction.attributes
    cublas = opcode == "custom-call" and 'target="__cublas$' in attributes
    if opcode not in ("dot", "convolution") and not cublas:
        return 0
    dims = [arrays_of(computation[name].shape)[0].dims for name in instruction.operands]
    result = arrays_of(instruction.shape)[0].dims  # A second array is the workspace of cuBLAS.
    if opcode == "convolution":
        return _convolution_flops(dims[0], dims[1], result, attributes)
    key = r'"lhs_contracting_dimensions":\[(.*?)\]' if cublas else r"lhs_contracting_dims={(.*?)}"
    match = re.search(key, attributes)
    contracting = re.findall(r"\d+", match.group(1)) if match else []
    return 2 * math.prod(result) * math.prod(dims[0][int(dim)] for dim in contracting)


def matmul_type(instruction: Instruction, computation: Computation) -> str:
    """Returns the element type of a matmul: the wider type of its two operands."""
    arrays = [arrays_of(computation[name].shape)[0] for name in instruction.operands[:2]]
    return max(arrays, key=lambda array: array.bits).dtype


def _convolution_flops(
    lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int], attributes: str
) -> int:
    # On TPU, dots are convolutions as well, with dilated windows for batch dims. Only count
    # elements that a window covers, but not padding or the gaps between dilated elements.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None, f"convolution without dim_labels: {attributes}"
    lhs_sizes, rhs_sizes, sizes = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), (lhs, rhs, result), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([-\w]+)", braced(attributes, "window=")))
    total = sizes["b"] * sizes["f"] * rhs_sizes["i"]
    for dim in sorted(lhs_sizes.keys() - {"b", "f"}):
        config = {key: values.split("x")[int(dim)] for key, values in window.items()}
        stride, lhs_dilation, rhs_dilation = (
            int(config.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        padding = int(config.get("pad", "0_0").split("_")[0])
        total *= window_hits(
            lhs_sizes[dim],
            rhs_sizes[dim],
            sizes[dim],
            stride,
            padding,
            lhs_dilation,
            rhs_dilation,
        )
    return 2 * total


@lru_cache(maxsize=1024)
def window_hits(
    lhs: int,
    rhs: int,
    outputs: int,
    stride: int,
    padding: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """Counts the (window tap, output) pairs that read an input element, along one dim.

    Args:
      lhs: Size of the input.
      rhs: Size of the window.
      outputs: Size of the result.
      stride: Stride of the window.
      padding: Number of zeros before the input.
      lhs_dilation: Dilation of the input.
      rhs_dilation: Dilation of the window.
    """
    # For a tap at `first`, output j reads position j * stride + first of the dilated input. This
    # position is an element (and not a gap) for every period-th j in a range.
    common = math.gcd(stride, lhs_dilation)
    period = lhs_dilation // common
    inverse, hits = pow(stride // common, -1, period), 0
    for first in range(-padding, rhs * rhs_dilation - padding, rhs_dilation):
        if first % common == 0:
            begin = max(0, -(first // stride))
            end = min(outputs, ((lhs - 1) * lhs_dilation - first) // stride + 1)
            begin += (-first // common * inverse - begin) % period
            hits += max(0, -((begin - end) // period))
    return hits
