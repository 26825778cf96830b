"""The instructions behind the kernels of CUDA graphs: a trace names the graph alone.

XLA launches most of a GPU's program as graphs, and an event's `hlo_op` is then "command_buffer_20".
But the kernels of a launch start in the order of the schedule, and XLA calls a fusion's kernel
after the fusion, or after another with the same content. Between these, kernels of libraries
(cuBLAS, cuDNN, NCCL) and copies belong to the library calls and copies of the schedule.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from praxis_lite.tools.explain.hlo import KINDS
from praxis_lite.tools.explain.hlo_text import Instruction, Program, callees

_WITHOUT_KERNEL = frozenset((
    "add-dependency", "after-all", "bitcast", "constant", "get-tuple-element",
    "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple",
))
_CALLS = ("condition", "body", "branch_computations", "true_computation", "false_computation",
          "to_apply", "calls", "called_computations")
# Points of an alignment: a kernel that has its fusion's name, one that a library call may have
# launched, another kernel of the same call, one that fits nowhere, an instruction without kernel.
_NAMED, _LIKELY, _POSSIBLE, _SAME, _STRAY, _SKIPPED = 4, 2, 1, 0, -2, -1
_NEVER = -(10**6)


class Schedule:
    """The instructions of a program that launch kernels, in the order in which they do.

    Attributes:
      names: of all its instructions.
    """

    def __init__(self, program: Program):
        self.names = frozenset(
            name for computation in program.computations.values() for name in computation
        )
        self._launched = list(_launched(program, program.entry))
        # An instruction's number, by the names of kernels that it may run under.
        by_content: dict[str, list[int]] = {}
        for number, item in enumerate(self._launched):
            by_content.setdefault(_content(item), []).append(number)
        self._by_kernel = {
            re.sub(r"\W", "_", item.name): by_content[_content(item)] for item in self._launched
        }
        self.instructions_of = functools.cache(self._instructions_of)
        self._of_library = functools.cache(self._of_library)

    def _instructions_of(self, kernels: tuple[str, ...]) -> tuple[str | None, ...]:
        """Returns the instruction behind each kernel of a graph, None where none is found.

        Args:
          kernels: their names, in the order in which they start.
        """
        units = list(_units(kernels, self._by_kernel))
        places = _aligned(self._points(kernels[main]) for _, main in units)
        result: list[str | None] = []
        for (first, main), place in zip(units, places, strict=True):
            if place is None:  # A name that a single instruction has, tells it anywhere.
                alone = self._of_name(kernels[main]) or ()
                place = alone[0] if len(alone) == 1 else None
            name = None if place is None else self._launched[place].name
            result += [name] * (main + 1 - first)
        return tuple(result)

    def _of_name(self, kernel: str) -> list[int] | None:
        # A name that was taken already has "__1" at its end.
        return self._by_kernel.get(kernel) or self._by_kernel.get(re.sub(r"__\d+$", "", kernel))

    def _points(self, kernel: str) -> np.ndarray:
        """Returns by instruction the points for a kernel that is its first."""
        named = self._of_name(kernel)
        if named is None:
            return self._of_library(kernel)
        result = np.full(len(self._launched), _NEVER, np.int32)
        result[named] = _NAMED
        return result

    def _of_library(self, kernel: str) -> np.ndarray:
        points = [_points_of_library(kernel, item) for item in self._launched]
        return np.array(points, np.int32)


def _launched(program: Program, computation: str) -> Iterator[Instruction]:
    for item in program.computations[computation].values():
        if item.opcode in ("while", "call", "conditional", "async-start"):
            for key in _CALLS:
                for callee in callees(item, key):
                    yield from _launched(program, callee)
        elif item.opcode not in _WITHOUT_KERNEL and not item.opcode.endswith("-done"):
            yield item


def _content(item: Instruction) -> str:
    """Returns a name that fusions of the same content share: XLA compiles a kernel for them all."""
    shared = re.search(r'deduplicated_name="([^"]*)"', item.attributes)
    return shared[1] if shared else item.name


def _units(kernels: Sequence[str], named: dict[str, list[int]]) -> Iterator[tuple[int, int]]:
    """Yields first and last of the kernels that belong together: a library clears memory first."""
    first = 0
    for place, kernel in enumerate(kernels):
        following = kernels[place + 1] if place + 1 < len(kernels) else ""
        if kernel.startswith("Memset") and following and following not in named:
            continue
        yield first, place
        first = place + 1


def _points_of_library(kernel: str, item: Instruction) -> int:
    kind = item.opcode.removesuffix("-start")
    is_copy = re.match(r"(?i)mem(cpy|set)", kernel)
    if is_copy or kind == "copy":
        moves = kind in ("copy", "fusion", "dynamic-slice", "dynamic-update-slice")
        return _LIKELY if is_copy and moves else _NEVER
    if "nccl" in kernel.lower() or kind in KINDS:
        return _LIKELY if kind in KINDS else _NEVER
    if "cudnn" in kernel.lower():
        return _LIKELY if "__cudnn" in item.attributes else _NEVER
    if item.opcode == "custom-call":
        if re.search(r"(?i)splitk_?reduce", kernel):  # The second kernel of a product.
            return _SAME
        return _POSSIBLE if "__cudnn" in item.attributes else _LIKELY
    return _POSSIBLE if "kind=kCustom" in item.attributes or kind != "fusion" else _NEVER


def _aligned(points: Iterable[np.ndarray]) -> list[int | None]:
    """Returns the instruction of each kernel, in ascending order, with the most points together.

    The instructions are a part of the schedule; None: a kernel that fits nowhere in it.

    Args:
      points: of each kernel, by instruction.
    """
    best, rows = None, []
    for given in points:
        numbers = np.arange(len(given), dtype=np.int32)
        if best is None:  # The first instruction may be any.
            best, begun = np.zeros_like(given), given
            origin = numbers
        else:
            # The best of all instructions before each, less those skipped between.
            slope = numbers * _SKIPPED
            reached = np.maximum.accumulate(best - slope)
            newest = np.maximum.accumulate(np.where(best - slope == reached, numbers, 0))
            origin = np.roll(newest, 1)
            begun = given + np.where(numbers > 0, np.roll(reached + slope, 1), _NEVER)
        fits = given > _NEVER
        continued = best + np.where(fits, _SAME, _STRAY)
        rows.append((fits, begun >= continued, origin))
        best = np.maximum(begun, continued)
    place, result = int(np.argmax(best)), []
    for fits, begins, origin in reversed(rows):
        result.append(place if fits[place] else None)
        place = int(origin[place]) if begins[place] else place
    return result[::-1]
