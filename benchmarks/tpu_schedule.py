"""How long a TPU program takes by its own schedule: a model, held against no hardware.

The TPU compiler writes into its text how many cycles it expects of each instruction. A collective
takes its bytes on the wire over the bandwidth of the torus axes that it runs along; one is on the
wire at a time, and what is scheduled between its start and its end goes on beside it. Pallas
kernels have no estimate and count as nothing.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping

from praxis_lite.explain import hlo
from praxis_lite.explain.hlo_text import Instruction, Program, arrays_of, parse, trip_count

# Clock in Hz, and bytes per second of one torus axis, both directions together (public figures).
CHIPS = {"v5e": (1.5e9, 90e9), "v5p": (1.75e9, 180e9), "v6e": (1.75e9, 180e9)}
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass
class Schedule:
    """What one step takes on one device.

    Attributes:
      cycles: that the compiler expects, of all instructions.
      seconds: from the first to the last instruction.
      waits: the part of `seconds` in which nothing computes, for the wire is awaited.
      wire_bytes: that leave or reach the device, in rings.
      of: by the JAX operation of an instruction, its cycles.
    """

    cycles: int = 0
    seconds: float = 0.0
    waits: float = 0.0
    wire_bytes: float = 0.0
    of: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def schedule(text: str, chip: str, permute_bandwidth: float = 1.0) -> Schedule:
    """Returns the schedule of a program's text.

    Args:
      chip: of CHIPS.
      permute_bandwidth: of collective-permute, as a part of an axis's: 0.5 for a ring that sends
        one way only and so uses one of the two links.
    """
    program = parse(text)
    walk = _Walk(program, *CHIPS[chip], permute_bandwidth)
    walk.made.seconds = walk.run(program.entry, 1)
    return walk.made


class _Walk:
    def __init__(self, program: Program, clock: float, axis_bandwidth: float, permute: float):
        self.program, self.clock, self.permute = program, clock, permute
        self.axis_bandwidth, self.made = axis_bandwidth, Schedule()

    def run(self, name: str, count: int) -> float:
        """Returns the seconds of a computation that runs `count` times; adds up the rest."""
        computation = self.program.computations[name]
        ends_in = {
            chain: one.name for one in computation.values() for chain, _ in self.fused(one)
        }
        now = wire_is_free = 0.0
        pending: dict[str, float] = {}

        def sent(seconds: float) -> float:
            nonlocal wire_is_free
            wire_is_free = max(now, wire_is_free) + seconds
            return wire_is_free

        def waited(until: float) -> float:
            self.made.waits += max(0.0, until - now) * count
            return max(now, until)

        for one in computation.values():
            kind = one.opcode.removesuffix("-start")
            if one.opcode == "while":
                trips = trip_count(self.program, computation, one) or 1
                (body,) = _named(one, "body")
                now += trips * self.run(body, count * trips)
            elif one.opcode == "conditional":
                now += self.run(self.costliest(one), count)
            elif one.opcode == "call":
                now += self.run(_named(one, "to_apply")[0], count)
            elif kind in hlo.KINDS:
                end = sent(self.on_the_wire(one, computation, count, is_fused=False))
                if one.opcode.endswith("-start"):
                    pending[one.name] = end
                else:
                    now = waited(end)
            elif one.opcode.endswith("-done") and one.operands[0] in pending:
                now = waited(pending.pop(one.operands[0]))
            else:
                starts = [
                    (chain, collective) for chain, collective in self.fused(one)
                    if chain not in pending
                ]
                for chain, (instruction, around) in starts:
                    pending[chain] = sent(
                        self.on_the_wire(instruction, around, count, is_fused=True)
                    )
                now += self.computed(one, count)
                for chain, _ in self.fused(one):
                    if ends_in[chain] == one.name and chain in pending:
                        now = waited(pending.pop(chain))
        return now

    def computed(self, one: Instruction, count: int) -> float:
        found = _CYCLES.search(one.attributes)
        cycles = int(found.group(1)) if found else 0
        self.made.cycles += cycles * count
        if cycles:
            name = re.search(r'op_name="([^"]*)"', one.attributes)
            self.made.of[name.group(1) if name else one.opcode] += cycles * count
        return cycles / self.clock

    def fused(self, one: Instruction) -> list[tuple[str, tuple[Instruction, Mapping]]]:
        """Returns the collectives in a fusion, by the chain of fusions that carry each out."""
        if one.opcode != "fusion":
            return []
        found = []
        for inner, around in self._inside(_named(one, "calls")[0]):
            chain = re.search(r'chain_id="(\d+)"', inner.attributes)
            found.append((chain.group(1) if chain else inner.name + one.name, (inner, around)))
        return found

    def _inside(self, name: str) -> Iterator[tuple[Instruction, Mapping]]:
        computation = self.program.computations[name]
        for one in computation.values():
            if one.opcode in hlo.KINDS:
                yield one, computation
            elif one.opcode in ("fusion", "call"):
                for callee in _named(one, "calls"):
                    yield from self._inside(callee)

    def on_the_wire(
        self, one: Instruction, around: Mapping, count: int, *, is_fused: bool
    ) -> float:
        """Returns the seconds of a collective, alone."""
        sizes = [around[name].shape for name in one.operands if name in around]
        size = sum(array.bytes for shape in sizes for array in arrays_of(shape))
        others = (hlo.devices_in_group(one.attributes, self.program) or 1) - 1
        kind = one.opcode.removesuffix("-start")
        if kind == "all-gather":
            wire = size * others
        elif kind == "collective-permute":
            wire = size
        else:
            wire = size * others / (others + 1)
            # With a slice of its result in one fusion an all-reduce is a reduce-scatter.
            slices = any(inner.opcode == "dynamic-slice" for inner in around.values())
            if kind == "all-reduce" and not (is_fused and slices):
                wire *= 2
        self.made.wire_bytes += wire * count
        along = re.search(r"num_dims:(\d+)", one.attributes)
        bandwidth = self.axis_bandwidth * max(1, int(along.group(1)) if along else 1)
        return wire / (bandwidth * (self.permute if kind == "collective-permute" else 1.0))

    def costliest(self, one: Instruction) -> str:
        """Returns the branch of a conditional with the most cycles."""
        branches = [
            name for key in ("branch_computations", "true_computation", "false_computation")
            for name in _named(one, key)
        ]
        return max(branches, key=self._cycles_of)

    def _cycles_of(self, name: str) -> int:
        computation = self.program.computations[name]
        return sum(
            int(found.group(1)) for one in computation.values()
            if (found := _CYCLES.search(one.attributes))
        )


def _named(one: Instruction, key: str) -> list[str]:
    found = re.search(rf" {key}=(\{{[^}}]*\}}|[%\w.\-]+)", one.attributes)
    return re.findall(r"[\w.\-]+", found.group(1)) if found else []
