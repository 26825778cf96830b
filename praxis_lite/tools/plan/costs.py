"""What an instruction costs on a chip: matmuls, memory, kernels. The model, explicit.

A TPU's compiler writes into its text how many cycles it expects of each instruction of its own;
these are taken, and divided by an efficiency. All else is worked out here: a roofline where there
are no cycles, kernels of attention by their matmuls. Collectives: schedule/wire.py.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from praxis_lite.tools.explain import hlo_matmuls
from praxis_lite.tools.explain.hlo_text import (
    Instruction,
    Program,
    arrays_of,
    callees,
    root_of,
)
from praxis_lite.tools.explain.kernels import (
    dims_per_head,
    is_kernel,
    kernel_flops,
    tiles_of_experts,
)
from praxis_lite.tools.plan.chips import Chip

# By the compiler, of the smallest of its own instructions.
LEAST_CYCLES = 1830
FUSIONS = ("fusion", "fusion-start")  # On a GPU the second one runs beside other instructions.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of a chip's abilities that programs get; fitted on published runs (docs/plan.md).

    Attributes:
      cycles: the compiler's cycles over those that pass; above 1 where it expects too many.
      kernel: of the peak, that a kernel reaches, Pallas's or cuDNN's, of heads that fill the
        chip's matmul units (`Chip.filled`).
      grouped: of the peak, that a kernel's grouped matmul of experts reaches within its tiles; not
        fitted: what the compiler's own large matmuls do.
      matmul: of the peak, that a matmul reaches where the compiler tells no cycles.
      hbm: of the memory's bandwidth, which no instruction exceeds; infinity: it is not asked.
      link: of a link's bandwidth, which the table of chips has at 0.9 of the maker's.
      network: of the bandwidth of a TPU to other slices.
      host: of the bandwidth to the host; not fitted.
      nodes: of the bandwidth of a GPU to other nodes.
      hop_seconds: for a message to reach the next device of a ring.
      network_seconds: for a message to another slice or node.
      waiting: relative, that a step grows each time the slices double: all wait for the slowest.
      step_seconds: of a step, whatever is in it.
      spread: relative; four of five runs were that near to what was predicted.
    """

    cycles: float = 1.0
    kernel: float = 0.5
    grouped: float = 0.9
    matmul: float = 0.6
    hbm: float = 1.0
    link: float = 1.0
    network: float = 1.0
    host: float = 1.0
    nodes: float = 0.8
    hop_seconds: float = 1e-6
    network_seconds: float = 1e-4
    waiting: float = 0.0
    step_seconds: float = 0.0
    spread: float = 0.15


# By `benchmarks/plan_published.py --fit`. `matmul` and `nodes` are guesses: of GPUs a single step
# was measured, on an H200, which took 97 ms rather than 105 (docs/profiles.md).
FITTED = Efficiencies(
    cycles=1.055, kernel=0.604, matmul=0.6, link=1.11, network=0.791, hop_seconds=1e-6,
    network_seconds=1e-4, waiting=0.0261, step_seconds=0.0, spread=0.15,
)


def compute_seconds(
    one: Instruction, around: Mapping[str, Instruction], program: Program, chip: Chip,
    efficiencies: Efficiencies,
) -> float:
    """Returns the seconds of an instruction that is no collective, loop, branch or call."""
    if result := _CYCLES.search(one.attributes):
        return int(result.group(1)) / (chip.clock or 1e9) / efficiencies.cycles
    if one.opcode.endswith("-done"):
        return 0.0
    if tiles := tiles_of_experts(one, around) if is_kernel(one) else None:
        multiplied = tiles.flops / (chip.peak() * efficiencies.grouped)
        return tiles.count * max(
            multiplied, tiles.bytes / (chip.hbm_bandwidth * efficiencies.hbm)
        )
    if is_kernel(one):
        # Heads of fewer dims than a matmul unit has rows leave the rest of it idle.
        dims = dims_per_head(one, around)
        share = efficiencies.kernel * (1.0 if dims is None else chip.filled(dims))
        return kernel_flops(one, around) / (chip.peak() * share)
    if chip.clock is not None:
        # What has no cycles is free, or hidden behind what has: copies in flight. Not a scatter.
        least = LEAST_CYCLES / chip.clock / efficiencies.cycles
        return least if is_update(one, program) and one.opcode == "fusion" else 0.0
    flops, dtype = _matmul(one, around, program)
    matmul = flops / (chip.peak(dtype) * efficiencies.matmul)
    return max(matmul, bytes_moved(one, around, program) / chip.hbm_bandwidth)


def is_matmul(one: Instruction, program: Program) -> bool:
    """Returns True if an instruction is a matmul, or a fusion around a matmul, or a kernel."""
    if one.opcode in ("dot", "convolution") or is_kernel(one):
        return True
    return one.opcode in FUSIONS and any(
        is_matmul(inner, program)
        for name in callees(one, "calls") for inner in program.computations[name].values()
    )


def _matmul(
    instruction: Instruction, around: Mapping[str, Instruction], program: Program
) -> tuple[int, str]:
    """Returns the matmul flops of an instruction and its calls, and its operands' type."""
    flops, dtype = hlo_matmuls.matmul_flops(instruction, around), "bf16"
    if flops:
        return flops, hlo_matmuls.matmul_type(instruction, around)
    if instruction.opcode in (*FUSIONS, "call"):
        for name in callees(instruction, "calls") or callees(instruction, "to_apply"):
            inside = program.computations[name]
            for inner in inside.values():
                more, of = _matmul(inner, inside, program)
                flops, dtype = flops + more, of if more else dtype
    return flops, dtype


def bytes_of(shape: str) -> int:
    """Returns the bytes of the arrays of a shape."""
    return sum(array.bytes for array in arrays_of(shape))


def bytes_moved(
    instruction: Instruction, around: Mapping[str, Instruction], program: Program,
    size: Callable[[str], int] = bytes_of,
) -> int:
    """Returns the bytes that an instruction reads and writes.

    Of a slice, of the rows of a table and of an update in place only the part that is taken.

    Args:
      size: the bytes of a shape that count.
    """
    if instruction.opcode in _FREE:
        return 0
    if instruction.opcode not in FUSIONS:
        return _part(instruction, around, size) or size(instruction.shape) + sum(
            size(around[name].shape) for name in instruction.operands if name in around
        )
    inside = program.computations[callees(instruction, "calls")[0]]
    # The shape of a begin has the operands too.
    is_begin = instruction.opcode != "fusion"
    result = size(root_of(inside).shape if is_begin else instruction.shape)
    if is_update(instruction, program) and result:
        root = _behind_names(root_of(inside), inside)
        result = bytes_of(inside[root.operands[_UPDATES[root.opcode]]].shape)
    reads = [size(around[name].shape) for name in instruction.operands if name in around]
    for inner in inside.values():
        index = int(inner.operands[0]) if inner.opcode == "parameter" else len(reads)
        if index < len(reads) and reads[index]:
            parts = _parts_read(inner.name, inside)
            reads[index] = reads[index] if parts is None else parts
    return result + sum(reads)


def is_update(one: Instruction, program: Program) -> bool:
    """Returns True if an instruction writes a part of an array in place."""
    if one.opcode in FUSIONS:
        inside = program.computations[callees(one, "calls")[0]]
        return _behind_names(root_of(inside), inside).opcode in _UPDATES
    return one.opcode in _UPDATES


def _part(
    instruction: Instruction, around: Mapping[str, Instruction], size: Callable[[str], int]
) -> int:
    """Returns the bytes of the part that is read and written, or 0 if the arrays are whole."""
    whole = around.get(instruction.operands[0]) if instruction.operands else None
    ends = (size(instruction.shape) > 0) + (whole is not None and size(whole.shape) > 0)
    if instruction.opcode in _SLICES:
        return ends * bytes_of(instruction.shape)
    if instruction.opcode in _UPDATES:
        return ends * bytes_of(around[instruction.operands[_UPDATES[instruction.opcode]]].shape)
    return 0


def _parts_read(name: str, inside: Mapping[str, Instruction]) -> int | None:
    """Returns the bytes that are read of an array, or None unless all users read parts."""
    total = 0
    users = [inner for inner in inside.values() if name in inner.operands]
    for inner in users:
        if _is_name(inner):
            parts = _parts_read(inner.name, inside)
            if parts is None:
                return None
            total += parts
        elif inner.operands[0] != name or inner.opcode not in (*_SLICES, *_UPDATES):
            return None
        elif inner.opcode in _SLICES:
            total += bytes_of(inner.shape)
    return total if users else None


def _behind_names(one: Instruction, inside: Mapping[str, Instruction]) -> Instruction:
    return _behind_names(inside[one.operands[0]], inside) if _is_name(one) else one


def _is_name(one: Instruction) -> bool:
    """Returns True for an array under another name.

    A fusion within a fusion whose result has its operand's place is one too: on TPU7x it tells
    that the rows of a tile are numbered in another way.
    """
    return one.opcode in _NAMES or (
        one.opcode == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in one.attributes
    )


_SLICES = ("dynamic-slice", "slice", "gather")  # They read what they give.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # In place; by the operand that is written.
_NAMES = ("bitcast", "reshape")
# Names of values, and what a program has only to be written down.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota",
    "partition-id", "replica-id", "opt-barrier", "copy-done", "slice-done", "reshape",
})
