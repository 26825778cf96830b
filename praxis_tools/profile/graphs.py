"""Finds the instruction of each kernel in a CUDA graph, since traces only name the graph.

XLA launches most of a GPU program as graphs, whose events have an `hlo_op` such as
"command_buffer_20". The kernels of a launch start in the order of the schedule. XLA names the
kernel of a fusion after the fusion, or after a different fusion with the same content. Library
kernels (cuBLAS, cuDNN, NCCL) and the copies between them belong to library calls and copies in the
schedule. The kernels are aligned with the schedule by dynamic programming.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from praxis_tools.explain.hlo import KINDS
from praxis_tools.explain.hlo_text import Instruction, Program, callees

_WITHOUT_KERNEL = frozenset(
    (
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "optimization-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    )
)
_CALLS = (
    "condition",
    "body",
    "branch_computations",
    "true_computation",
    "false_computation",
    "to_apply",
    "calls",
    "called_computations",
)
# Scores of an alignment.
_NAMED = 4  # A kernel named after the fusion.
_LIKELY, _POSSIBLE = 2, 1  # A kernel that a library call may have launched.
_SAME = 0  # An additional kernel of the same call.
_SKIPPED = -1  # An instruction without a kernel.
_STRAY = -2  # A kernel that matches no instruction.
_NEVER = -(10**6)


class Schedule:
    """The instructions of a program that launch kernels, in launch order.

    Attributes:
      names: Names of the instructions.
    """

    def __init__(self, program: Program):
        self.names = frozenset(
            name for computation in program.computations.values() for name in computation
        )
        self._launched = list(_launched(program, program.entry))
        # Maps each content to the indices of the instructions with this content.
        by_content: dict[str, list[int]] = {}
        for index, instruction in enumerate(self._launched):
            by_content.setdefault(_content(instruction), []).append(index)
        self._by_kernel = {
            re.sub(r"\W", "_", instruction.name): by_content[_content(instruction)]
            for instruction in self._launched
        }
        # The same graphs are launched in every step, so cache the results per instance.
        self.instructions_of = functools.cache(self._instructions_of)
        self._library_scores = functools.cache(self._compute_library_scores)

    def _instructions_of(self, kernels: tuple[str, ...]) -> tuple[str | None, ...]:
        """Returns the instruction of each kernel in a graph; None for unknown instructions.

        Args:
          kernels: Names of the kernels in launch order.
        """
        units = list(_units(kernels, self._by_kernel))
        indices = _aligned(self._scores(kernels[main]) for _, main in units)
        names: list[str | None] = []
        for (first, main), index in zip(units, indices, strict=True):
            if index is None:  # A unique name identifies the instruction at any position.
                named = self._named(kernels[main]) or ()
                index = named[0] if len(named) == 1 else None
            name = None if index is None else self._launched[index].name
            names += [name] * (main + 1 - first)
        return tuple(names)

    def _named(self, kernel: str) -> list[int] | None:
        # XLA appends "__1" to names that are already in use.
        return self._by_kernel.get(kernel) or self._by_kernel.get(re.sub(r"__\d+$", "", kernel))

    def _scores(self, kernel: str) -> np.ndarray:
        """Returns a kernel's score for being the first kernel of each instruction."""
        named = self._named(kernel)
        if named is None:
            return self._library_scores(kernel)
        scores = np.full(len(self._launched), _NEVER, np.int32)
        scores[named] = _NAMED
        return scores

    def _compute_library_scores(self, kernel: str) -> np.ndarray:
        scores = [_library_score(kernel, instruction) for instruction in self._launched]
        return np.array(scores, np.int32)


def _launched(program: Program, computation: str) -> Iterator[Instruction]:
    """Yields the instructions that launch kernels, in launch order."""
    for instruction in program.computations[computation].values():
        opcode = instruction.opcode
        if opcode in ("while", "call", "conditional", "async-start"):
            for key in _CALLS:
                for callee in callees(instruction, key):
                    yield from _launched(program, callee)
        elif opcode not in _WITHOUT_KERNEL and not opcode.endswith("-done"):
            yield instruction


def _content(instruction: Instruction) -> str:
    """Returns a key shared by fusions with equal content, for which XLA compiles one kernel."""
    shared = re.search(r'deduplicated_name="([^"]*)"', instruction.attributes)
    return shared[1] if shared else instruction.name


def _units(kernels: Sequence[str], named: dict[str, list[int]]) -> Iterator[tuple[int, int]]:
    """Yields the (first, last) kernel of each launched instruction.

    A library call may start with a memset, which belongs to the same instruction.
    """
    first = 0
    for index, kernel in enumerate(kernels):
        following = kernels[index + 1] if index + 1 < len(kernels) else ""
        if kernel.startswith("Memset") and following and following not in named:
            continue
        yield first, index
        first = index + 1


def _library_score(kernel: str, instruction: Instruction) -> int:
    """Returns the score of a library kernel or copy for being an instruction's first kernel."""
    kind = instruction.opcode.removesuffix("-start")
    is_copy = re.match(r"(?i)mem(cpy|set)", kernel)
    if is_copy or kind == "copy":
        moves = kind in ("copy", "fusion", "dynamic-slice", "dynamic-update-slice")
        return _LIKELY if is_copy and moves else _NEVER
    if "nccl" in kernel.lower() or kind in KINDS:
        return _LIKELY if kind in KINDS else _NEVER
    if "cudnn" in kernel.lower():
        return _LIKELY if "__cudnn" in instruction.attributes else _NEVER
    if instruction.opcode == "custom-call":
        if re.search(r"(?i)splitk_?reduce", kernel):  # The second kernel of a matmul.
            return _SAME
        return _POSSIBLE if "__cudnn" in instruction.attributes else _LIKELY
    is_custom_fusion = "kind=kCustom" in instruction.attributes
    return _POSSIBLE if is_custom_fusion or kind != "fusion" else _NEVER


def _aligned(scores: Iterable[np.ndarray]) -> list[int | None]:
    """Aligns kernels with instructions, in order, so that the total score is maximal.

    Skip this on a first read. The sequence alignment uses dynamic programming: `best[i]` is the
    best score of the kernels so far if the last kernel belongs to instruction i. A kernel either
    continues the current instruction, or starts a later instruction and skips the instructions in
    between.

    Args:
      scores: Yields, for each kernel, its score for each instruction.

    Returns:
      The instruction index of each kernel, in ascending order; None for kernels without a match.
    """
    best: np.ndarray | None = None
    choices: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for score in scores:
        indices = np.arange(len(score), dtype=np.int32)
        if best is None:  # The first kernel can start any instruction.
            best, begun = np.zeros_like(score), score
            previous = indices
        else:
            # The best score of any earlier instruction, minus the penalty for skipped instructions.
            penalty = indices * _SKIPPED
            reached = np.maximum.accumulate(best - penalty)
            latest = np.maximum.accumulate(np.where(best - penalty == reached, indices, 0))
            previous = np.roll(latest, 1)
            begun = score + np.where(indices > 0, np.roll(reached + penalty, 1), _NEVER)
        fits = score > _NEVER
        continued = best + np.where(fits, _SAME, _STRAY)
        choices.append((fits, begun >= continued, previous))
        best = np.maximum(begun, continued)
    if best is None:
        return []
    # Trace the choices back from the best end.
    index = int(np.argmax(best))
    aligned: list[int | None] = []
    for fits, begins, previous in reversed(choices):
        aligned.append(index if fits[index] else None)
        index = int(previous[index]) if begins[index] else index
    return aligned[::-1]
