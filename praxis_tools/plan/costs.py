"""Cost model for instructions on a chip: matmuls, memory accesses and kernels.

The TPU compiler annotates most instructions with estimated cycles, which the model divides by a
fitted efficiency. The model uses a roofline estimate for instructions without cycles, and the time
of the matmuls for attention kernels. Collectives are modeled in schedule/collective_cost.py.
"""

import dataclasses
import re
from collections.abc import Callable

from praxis_tools.explain import hlo_matmuls
from praxis_tools.explain.hlo_text import (
    Computation,
    Instruction,
    Program,
    arrays_of,
    callees,
    root_of,
)
from praxis_tools.explain.kernels import (
    dims_per_head,
    is_kernel,
    kernel_flops,
    tiles_of_experts,
)
from praxis_tools.plan.chips import Chip

FUSIONS = ("fusion", "fusion-start")  # fusion-start (GPU) runs asynchronously.
_MIN_CYCLES = 1830  # The TPU compiler's estimate for its smallest instruction.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SLICES = ("dynamic-slice", "slice", "gather")  # These read only the returned elements.
# Instructions that write one operand into another in place, and the index of the written operand.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_VIEWS = ("bitcast", "reshape")
# Instructions that move no data.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "iota",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "copy-done",
        "slice-done",
        "reshape",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Fractions of a chip's peak rates that programs reach, fitted to published runs.

    docs/plan_accuracy.md describes the runs and the fit.

    Attributes:
      cycles: Ratio of the compiler's estimated cycles to measured cycles; above 1 means that the
        compiler overestimates.
      kernel: Fraction of peak flops that a kernel (Pallas, cuDNN) reaches if its heads fill the
        chip's matmul units (`Chip.mxu_utilization`).
      grouped: Fraction of peak flops that an expert's grouped matmul reaches within its tiles. This
        is not fitted, but set to the value for the compiler's large matmuls.
      matmul: Fraction of peak flops that a matmul reaches if the compiler does not estimate its
        cycles.
      hbm: Maximum fraction of the HBM bandwidth that any instruction reaches; infinity disables
        the limit.
      link: Fraction of a link's bandwidth, relative to `Chip.link_bandwidth`, which is already 0.9
        times the vendor's figure.
      network: Fraction of a TPU's bandwidth to other slices.
      host: Fraction of the bandwidth to the host; not fitted.
      nodes: Fraction of a GPU's bandwidth to other nodes.
      hop_seconds: Latency of a message to the next device in a ring.
      network_seconds: Latency of a message to another slice or node.
      waiting: Relative increase in step time for each doubling of the number of slices, because all
        slices wait for the slowest one.
      step_seconds: Constant overhead of every step.
      spread: Relative error that four out of five predictions did not exceed.
    """

    # Fitted by `benchmarks/plan_published.py --fit`, except that `matmul` and `nodes` are guesses:
    # only one step was measured on a GPU (H200: 97 ms measured, 105 ms predicted; see
    # docs/profiles.md).
    cycles: float = 1.055
    kernel: float = 0.604
    grouped: float = 0.9
    matmul: float = 0.6
    hbm: float = 1.0
    link: float = 1.11
    network: float = 0.791
    host: float = 1.0
    nodes: float = 0.8
    hop_seconds: float = 1e-6
    network_seconds: float = 1e-4
    waiting: float = 0.0261
    step_seconds: float = 0.0
    spread: float = 0.15


FITTED = Efficiencies()


def compute_seconds(
    instruction: Instruction,
    computation: Computation,
    program: Program,
    chip: Chip,
    efficiencies: Efficiencies,
) -> float:
    """Returns the time of an instruction, excluding collectives, loops, branches and calls."""
    if cycles := _CYCLES.search(instruction.attributes):
        return int(cycles.group(1)) / (chip.clock or 1e9) / efficiencies.cycles
    if instruction.opcode.endswith("-done"):
        return 0.0
    if is_kernel(instruction):
        return _kernel_seconds(instruction, computation, chip, efficiencies)
    if chip.clock is not None:
        # On TPU, instructions without cycles are free or overlap with others, except for scatters.
        is_scatter = instruction.opcode == "fusion" and is_update(instruction, program)
        return _MIN_CYCLES / chip.clock / efficiencies.cycles if is_scatter else 0.0
    flops, dtype = _matmul(instruction, computation, program)
    matmul = flops / (chip.peak(dtype) * efficiencies.matmul)
    return max(matmul, bytes_moved(instruction, computation, program) / chip.hbm_bandwidth)


def _kernel_seconds(
    kernel: Instruction, computation: Computation, chip: Chip, efficiencies: Efficiencies
) -> float:
    if tiles := tiles_of_experts(kernel, computation):
        matmul = tiles.flops / (chip.peak() * efficiencies.grouped)
        return tiles.num_tiles * max(matmul, tiles.bytes / (chip.hbm_bandwidth * efficiencies.hbm))
    # A head dim smaller than a matmul unit leaves the rest of the unit idle.
    dims = dims_per_head(kernel, computation)
    efficiency = efficiencies.kernel * (1.0 if dims is None else chip.mxu_utilization(dims))
    return kernel_flops(kernel, computation) / (chip.peak() * efficiency)


def is_matmul(instruction: Instruction, program: Program) -> bool:
    """Returns whether an instruction is a matmul, a kernel, or a fusion that contains one."""
    if instruction.opcode in ("dot", "convolution") or is_kernel(instruction):
        return True
    return instruction.opcode in FUSIONS and any(
        is_matmul(inner, program)
        for name in callees(instruction, "calls")
        for inner in program.computations[name].values()
    )


def _matmul(
    instruction: Instruction, computation: Computation, program: Program
) -> tuple[int, str]:
    """Returns the matmul flops and dtype of an instruction, including called computations."""
    flops, dtype = hlo_matmuls.matmul_flops(instruction, computation), "bf16"
    if flops:
        return flops, hlo_matmuls.matmul_type(instruction, computation)
    if instruction.opcode in (*FUSIONS, "call"):
        for name in callees(instruction, "calls") or callees(instruction, "to_apply"):
            called = program.computations[name]
            for inner in called.values():
                inner_flops, inner_dtype = _matmul(inner, called, program)
                if inner_flops:
                    flops, dtype = flops + inner_flops, inner_dtype
    return flops, dtype


def bytes_of(shape: str) -> int:
    """Returns the total bytes of all arrays in a shape."""
    return sum(array.bytes for array in arrays_of(shape))


def bytes_moved(
    instruction: Instruction,
    computation: Computation,
    program: Program,
    size: Callable[[str], int] = bytes_of,
) -> int:
    """Returns the bytes that an instruction reads and writes.

    For slices, gathers and in-place updates, only the accessed elements of an array are counted.

    Args:
      instruction: An instruction of `computation`.
      computation: A computation of `program`.
      program: The compiled program.
      size: Function that returns the bytes to count for a shape. Defaults to the bytes in all
        memory spaces.
    """
    if instruction.opcode in _FREE:
        return 0
    operands = [
        size(computation[name].shape) for name in instruction.operands if name in computation
    ]
    if instruction.opcode not in FUSIONS:
        sliced = _sliced_bytes(instruction, computation, size)
        return sliced or size(instruction.shape) + sum(operands)
    fused = program.computations[callees(instruction, "calls")[0]]
    # The shape of a fusion-start also contains the operands.
    is_start = instruction.opcode == "fusion-start"
    written = size(root_of(fused).shape if is_start else instruction.shape)
    # An update in place only writes the updated elements.
    if is_update(instruction, program) and written:
        update = _skip_views(root_of(fused), fused)
        written = bytes_of(fused[update.operands[_UPDATES[update.opcode]]].shape)
    # If a fusion only reads slices of a parameter, count these slices.
    for inner in fused.values():
        index = int(inner.operands[0]) if inner.opcode == "parameter" else len(operands)
        if index < len(operands) and operands[index]:
            bytes_read = _bytes_read_in_slices(inner.name, fused)
            if bytes_read is not None:
                operands[index] = bytes_read
    return written + sum(operands)


def is_update(instruction: Instruction, program: Program) -> bool:
    """Returns whether an instruction updates part of an array in place."""
    if instruction.opcode in FUSIONS:
        fused = program.computations[callees(instruction, "calls")[0]]
        return _skip_views(root_of(fused), fused).opcode in _UPDATES
    return instruction.opcode in _UPDATES


def _sliced_bytes(
    instruction: Instruction, computation: Computation, size: Callable[[str], int]
) -> int:
    """Returns the bytes that a slice or update reads and writes, or 0 for other instructions."""
    array = computation.get(instruction.operands[0]) if instruction.operands else None
    # Count the source and the destination only if `size` counts their memory spaces.
    num_counted = (size(instruction.shape) > 0) + (array is not None and size(array.shape) > 0)
    if instruction.opcode in _SLICES:
        return num_counted * bytes_of(instruction.shape)
    if instruction.opcode in _UPDATES:
        update = instruction.operands[_UPDATES[instruction.opcode]]
        return num_counted * bytes_of(computation[update].shape)
    return 0


def _bytes_read_in_slices(name: str, computation: Computation) -> int | None:
    """Returns the bytes read from an array if all its users slice it, or None otherwise."""
    total = 0
    users = [user for user in computation.values() if name in user.operands]
    for user in users:
        if _is_view(user):
            sliced = _bytes_read_in_slices(user.name, computation)
            if sliced is None:
                return None
            total += sliced
        elif user.operands[0] != name or user.opcode not in (*_SLICES, *_UPDATES):
            return None
        elif user.opcode in _SLICES:
            total += bytes_of(user.shape)
    return total if users else None


def _skip_views(instruction: Instruction, computation: Computation) -> Instruction:
    """Follows bitcasts and reshapes back to the instruction that computes the data."""
    while _is_view(instruction):
        instruction = computation[instruction.operands[0]]
    return instruction


def _is_view(instruction: Instruction) -> bool:
    """Returns whether an instruction returns the data of its operand without moving it.

    On TPU7x, this includes nested fusions that alias their operand, because they only renumber the
    rows of a tile.
    """
    return instruction.opcode in _VIEWS or (
        instruction.opcode == "fusion"
        and "output_to_operand_aliasing={{}: (0, {})}" in instruction.attributes
    )
