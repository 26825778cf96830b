"""Collectives and copies within an instruction of a compiled program: a fusion, or a call."""

import re
from collections.abc import Iterator, Mapping

from praxis_lite.tools.explain import hlo
from praxis_lite.tools.explain.hlo_text import Instruction, Program, callees, root_of
from praxis_lite.tools.plan.schedule.hbm import HostCopy, host_copy

Computation = Mapping[str, Instruction]


class Held:
    """The collectives and copies within a program's instructions, by its text."""

    def __init__(self, program: Program):
        self._program = program
        self._fusions: dict[str, list[tuple[str, Instruction, Computation]]] = {}

    def fused(self, one: Instruction) -> list[tuple[str, Instruction, Computation]]:
        """Returns the collectives in a fusion, with the chain of fusions that carry each out."""
        if one.opcode != "fusion":
            return []
        if one.name not in self._fusions:
            self._fusions[one.name] = [
                (chain.group(1) if chain else inner.name + one.name, inner, around)
                for inner, around in self._inside(callees(one, "calls")[0])
                for chain in [re.search(r'chain_id="(\d+)"', inner.attributes)]
            ]
        return self._fusions[one.name]

    def _inside(self, name: str) -> Iterator[tuple[Instruction, Computation]]:
        computation = self._program.computations[name]
        for item in computation.values():
            if item.opcode in hlo.KINDS:
                yield item, computation
            elif item.opcode in ("fusion", "call"):
                for callee in callees(item, "calls"):
                    yield from self._inside(callee)

    def called(self, one: Instruction) -> tuple[Instruction, Computation] | None:
        """Returns the collective that an asynchronous call holds, of a GPU or SparseCore, or None.

        A SparseCore's is in a custom call within.
        """
        for name in callees(one, "calls") or callees(one, "called_computations"):
            computation = self._program.computations[name]
            for inner in computation.values():
                if inner.opcode in hlo.KINDS:
                    return inner, computation
                if inner.opcode == "custom-call" and (result := self.called(inner)):
                    return result
        return None

    def copied(self, one: Instruction) -> HostCopy | None:
        """Returns the copy to or from the host that an asynchronous call holds, or None."""
        insides = [self._program.computations[name] for name in callees(one, "calls")]
        return next(filter(None, (host_copy(root_of(inside), inside) for inside in insides)), None)
