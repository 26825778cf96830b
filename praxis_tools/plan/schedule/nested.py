"""Finds collectives and host copies inside fusions and asynchronous calls."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from praxis_tools.explain import hlo
from praxis_tools.explain.hlo_text import (
    Computation,
    Instruction,
    Program,
    callees,
    root_of,
)
from praxis_tools.plan.schedule.copies import HostCopy, host_copy


class NestedCollective(NamedTuple):
    """A collective inside a fusion or call, together with the computation that contains it.

    The TPU compiler may spread one collective over several fusions, each of which contains a copy
    of the instruction. All copies have the same `chain`.
    """

    chain: str
    instruction: Instruction
    computation: Computation


class NestedTransfers:
    """Finds the transfers inside the fusions and asynchronous calls in a program."""

    def __init__(self, program: Program):
        self._program = program
        self._in_fusion: dict[str, list[NestedCollective]] = {}

    def in_fusion(self, fusion: Instruction) -> list[NestedCollective]:
        """Returns the collectives inside a fusion, or an empty list for other instructions."""
        if fusion.opcode != "fusion":
            return []
        if fusion.name not in self._in_fusion:
            self._in_fusion[fusion.name] = [
                NestedCollective(
                    chain.group(1) if chain else inner.name + fusion.name, inner, computation
                )
                for inner, computation in self._collectives(callees(fusion, "calls")[0])
                for chain in [re.search(r'chain_id="(\d+)"', inner.attributes)]
            ]
        return self._in_fusion[fusion.name]

    def _collectives(self, name: str) -> Iterator[tuple[Instruction, Computation]]:
        computation = self._program.computations[name]
        for instruction in computation.values():
            if instruction.opcode in hlo.KINDS:
                yield instruction, computation
            elif instruction.opcode in ("fusion", "call"):
                for callee in callees(instruction, "calls"):
                    yield from self._collectives(callee)

    def in_async_call(self, call: Instruction) -> tuple[Instruction, Computation] | None:
        """Returns the collective in an asynchronous call (GPU, SparseCore), or None.

        On a SparseCore, the collective is one level deeper, inside a custom call.
        """
        for name in callees(call, "calls") or callees(call, "called_computations"):
            computation = self._program.computations[name]
            for instruction in computation.values():
                if instruction.opcode in hlo.KINDS:
                    return instruction, computation
                if instruction.opcode == "custom-call" and (
                    nested := self.in_async_call(instruction)
                ):
                    return nested
        return None

    def host_copy_in_async_call(self, call: Instruction) -> HostCopy | None:
        """Returns the host copy in an asynchronous call, or None."""
        computations = [self._program.computations[name] for name in callees(call, "calls")]
        copies = (host_copy(root_of(computation), computation) for computation in computations)
        return next(filter(None, copies), None)
