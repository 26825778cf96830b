"""The time of each instruction of a compiled step: the overlap rule, and the exposed rest.

Instructions run one after the other, in the order of the compiled program. One collective is on the
wires inside a slice at a time, and one on the network between slices; what is scheduled between a
collective's start and its end goes on beside it, and only what is left of it then is waited for.
Copies to the host and from it go by the same rule, each way over a wire of its own. What a kernel,
a matmul or a collective costs is `costs`'.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.tools.explain import hlo, hlo_matmuls
from praxis_lite.tools.explain.hlo_groups import axes_of_groups, device_groups
from praxis_lite.tools.explain.hlo_layers import (
    layers_of,
    nearest_layer,
    source_frames,
    source_line,
    together,
)
from praxis_lite.tools.explain.hlo_runs import Site, is_of_uneven_loads, trip_count
from praxis_lite.tools.explain.hlo_text import (
    Instruction,
    Program,
    arrays_of,
    callees,
    op_name_of,
    parse,
)
from praxis_lite.tools.explain.kernels import is_kernel, kernel_flops
from praxis_lite.tools.plan.chips import Chip
from praxis_lite.tools.plan.costs import (
    FITTED,
    FUSIONS,
    Efficiencies,
    bytes_moved,
    bytes_of,
    compute_seconds,
    is_matmul,
)
from praxis_lite.tools.plan.schedule.hbm import (
    DONES,
    FROM_HOST,
    STARTS,
    TO_HOST,
    HostCopy,
    Traffic,
    bytes_in_hbm,
    host_copy,
)
from praxis_lite.tools.plan.schedule.held import Held
from praxis_lite.tools.plan.schedule.timeline import Mesh, OnWire, Timeline
from praxis_lite.tools.plan.schedule.wire import Wire, torus_dims, wire_seconds


def schedule(
    text: str, chip: Chip, mesh: Mesh, efficiencies: Efficiencies = FITTED, *,
    both_links: bool = False, turn_of: str | None = None, without: str | None = None,
) -> Timeline:
    """Returns the schedule of a program's text.

    Args:
      text: as `Compiled.as_text()` writes it.
      both_links: a collective-permute sends both ways round, over two links; else over one, as a
        ring that turns one way.
      turn_of: the body of a loop, which alone is scheduled, once.
      without: the body of a loop that takes no time.
    """
    walk = _Walk(parse(text), chip, mesh, efficiencies, both_links, without)
    walk.made.seconds = walk.run(turn_of or walk.program.entry, 1)
    return walk.made


class _Walk:
    def __init__(
        self, program: Program, chip: Chip, mesh: Mesh, efficiencies: Efficiencies, both: bool,
        without: str | None,
    ):
        self.program, self.held, self.chip, self.mesh = program, Held(program), chip, mesh
        self.efficiencies, self.both_links, self.made = efficiencies, both, Timeline()
        self.without = without
        self.traffic = Traffic(chip.hbm_bandwidth * efficiencies.hbm)

    def apart(self, name: str) -> float:
        """Returns the seconds of a computation that runs once, which are no part of the step's."""
        return _Walk(
            self.program, self.chip, self.mesh, self.efficiencies, self.both_links, self.without
        ).run(name, 1)

    def run(self, name: str, count: int) -> float:
        """Returns the seconds of a computation that runs `count` times; adds up the rest."""
        computation = self.program.computations[name]
        ends_in = {
            chain: one.name for one in computation.values() for chain, *_ in self.held.fused(one)
        }
        # The wires, the network, the link to the host.
        now, is_free = 0.0, dict.fromkeys((False, True, TO_HOST, FROM_HOST), 0.0)
        pending: dict[str, tuple[float, OnWire]] = {}
        started_cores: dict[str, tuple[Instruction, Mapping]] = {}

        def sent(one: Instruction, around: Mapping, outside: str = "") -> tuple[float, OnWire]:
            in_fusion = computation[outside] if outside else None
            seconds, crosses, entry = self.on_the_wire(one, around, count, in_fusion, computation)
            entry.instructions.add(item.name)
            is_free[crosses] = max(now, is_free[crosses]) + seconds
            return is_free[crosses], entry

        def copied(copy: HostCopy) -> tuple[float, OnWire]:
            seconds, entry = self.on_host_link(item, computation, copy, count)
            is_free[copy.kind] = max(now, is_free[copy.kind]) + seconds
            return is_free[copy.kind], entry

        def waited(until: float, entry: OnWire) -> float:
            entry.exposed_seconds += max(0.0, until - now) * count
            entry.instructions.add(item.name)
            self.traffic.passed(max(0.0, until - now))
            return max(now, until)

        for item in computation.values():
            kind = item.opcode.removesuffix("-start")
            if item.opcode == "while":
                if callees(item, "body")[0] == self.without:
                    continue
                (body,) = callees(item, "body")
                trips = trip_count(self.program, computation, item)
                if trips is None and is_of_uneven_loads(self.program, item):
                    self.made.expert_turn_seconds += self.apart(body) * count
                else:
                    now += (trips or 1) * self.run(body, count * (trips or 1))
            elif item.opcode == "conditional":
                now += self.run(self.costliest(item), count)
            elif item.opcode == "call":
                now += self.run(callees(item, "to_apply")[0], count)
            elif item.opcode == "async-start" and (held := self.held.called(item)):
                if item.operands:
                    pending[item.name] = sent(*held)
                else:  # A SparseCore is started; it gets what it sends by the update that follows.
                    started_cores[item.name] = held
            elif item.opcode == "async-start" and (copy := self.held.copied(item)):
                pending[item.name] = copied(copy)
            elif item.opcode == "async-update" and item.operands[0] in started_cores:
                pending[item.name] = sent(*started_cores.pop(item.operands[0]))
            elif kind in hlo.KINDS or self.is_transfer(item):
                end, entry = sent(item, computation)
                if item.opcode.endswith("-start") or item.opcode in ("send", "recv"):
                    pending[item.name] = end, entry
                else:
                    now = waited(end, entry)
            elif copy := host_copy(item, computation):
                if item.opcode.endswith("-start"):
                    pending[item.name] = copied(copy)
                else:
                    now = waited(*copied(copy))
            elif item.opcode in STARTS:
                self.traffic.begin(item)
            elif item.opcode.endswith("-done") and item.operands and item.operands[0] in pending:
                now = waited(*pending.pop(item.operands[0]))
            elif item.opcode in DONES:
                now += self.spent(item, self.traffic.wait(item.operands[0]), count)
            else:
                started = {chain for chain, *_ in self.held.fused(item)} - pending.keys()
                for chain, instruction, around in self.held.fused(item):
                    if chain in started:
                        pending[chain] = sent(instruction, around, ends_in[chain])
                        started.discard(chain)
                now += self.computed(item, computation, count)
                for chain, *_ in self.held.fused(item):
                    if ends_in[chain] == item.name and chain in pending:
                        now = waited(*pending.pop(chain))
        return now

    def is_transfer(self, one: Instruction) -> bool:
        """Returns True for a TPU's message to another slice, which the text has in two halves."""
        return one.opcode == "send" and "_xla_megascale_transfer_type" in one.attributes

    def computed(self, one: Instruction, around: Mapping, count: int) -> float:
        seconds = compute_seconds(one, around, self.program, self.chip, self.efficiencies)
        flops = self.flops_of(one, around, count)
        if "tpu_custom_call" in one.attributes and not flops and not seconds:
            self.made.unknown_kernels.add(one.name)
        if self.chip.clock is not None and seconds:
            taken = bytes_moved(one, around, self.program, bytes_in_hbm)
            seconds = max(seconds, taken / self.traffic.bandwidth)
            self.traffic.passed(seconds, taken)
        return self.spent(one, seconds, count, bool(flops) or is_matmul(one, self.program))

    def spent(
        self, one: Instruction, seconds: float, count: int, is_compute: bool = False
    ) -> float:
        """Returns the seconds, and adds them to those of the instruction and of its kind."""
        if seconds:
            if is_compute:
                self.made.compute += seconds * count
            else:
                self.made.memory += seconds * count
            self.made.of[one.name] += seconds * count
        return seconds

    def flops_of(self, one: Instruction, around: Mapping, count: int) -> int:
        """Returns the matmul flops of an instruction and its calls; adds them up."""
        if one.opcode in FUSIONS:
            inside = self.program.computations[callees(one, "calls")[0]]
            return sum(self.flops_of(inner, inside, count) for inner in inside.values())
        flops = hlo_matmuls.matmul_flops(one, around)
        dtype = hlo_matmuls.matmul_type(one, around) if flops else "bf16"
        if not flops and is_kernel(one):
            flops = kernel_flops(one, around)
            self.made.kernel_flops += flops * count
        self.made.flops += flops * count
        if flops:
            self.made.flops_by_type[dtype] += flops * count
        if RECOMPUTED in op_name_of(one):
            self.made.recomputed_flops += flops * count
        return flops

    def on_the_wire(
        self, one: Instruction, around: Mapping, count: int, fusion: Instruction | None,
        outside: Mapping,
    ) -> tuple[float, bool, OnWire]:
        """Returns a collective's seconds, alone, if it crosses, and the entry it is counted in.

        Args:
          fusion: in `outside`, that ends the collective, if it is part of one.
        """
        kind = one.opcode.removesuffix("-start")
        shapes = [around[name].shape for name in one.operands if name in around]
        operands = sum(map(bytes_of, shapes))
        groups = device_groups(one.attributes, self.program)
        crosses = kind == "send" or self.mesh.crosses(groups)
        if kind == "send":
            operands = sum(array.bytes for array in arrays_of(one.shape)[:1])
            result = re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)
            kind = result.group(1).lower().replace("_", "-")
            kind = kind if kind in hlo.KINDS else "collective-permute"
        # With a slice of its result in one fusion an all-reduce is a reduce-scatter.
        slices = any(inner.opcode == "dynamic-slice" for inner in around.values())
        if kind == "all-reduce" and fusion is not None and slices:
            kind = "reduce-scatter"
        group = groups.shape[1] if groups is not None else int(self.mesh.slices.max()) + 1
        links, is_ring = self._links(one, kind, groups)
        wire = Wire(kind=kind, bytes=operands, group=group, links=links, is_ring=is_ring,
                    per_chip=self.mesh.per_chip(groups), crosses=crosses)
        seconds = wire_seconds(wire, self.chip, self.efficiencies)
        entry = self._entry(one, around, kind, groups, fusion, outside)
        entry.crosses |= crosses
        entry.count, entry.seconds = entry.count + count, entry.seconds + seconds * count
        entry.wire_bytes += wire.sent * count
        results = {"all-gather": operands * group, "reduce-scatter": operands // group}
        entry.bytes += int(results.get(kind, operands)) * count
        return seconds, crosses, entry

    def on_host_link(
        self, one: Instruction, around: Mapping, copy: HostCopy, count: int
    ) -> tuple[float, OnWire]:
        """Returns the seconds of a copy to or from the host, and the entry it is counted in."""
        seconds = copy.bytes / (self.chip.host_bandwidth * self.efficiencies.host)
        layer, source = self._place(one, around, one, around)
        entry = self.made.host_copies.setdefault(
            (copy.kind, (), layer), OnWire(copy.kind, (), layer, source)
        )
        entry.count, entry.seconds = entry.count + count, entry.seconds + seconds * count
        entry.bytes, entry.wire_bytes = (
            size + copy.bytes * count for size in (entry.bytes, entry.wire_bytes)
        )
        return seconds, entry

    def _entry(
        self, instruction: Instruction, around: Mapping, kind: str, groups: np.ndarray | None,
        fusion: Instruction | None, outside: Mapping,
    ) -> OnWire:
        axes = axes_of_groups(groups, self.mesh.axis_sizes) if groups is not None else ()
        if instruction.opcode == "send":
            axes = self.mesh.axes_between_slices()
        whole = fusion._replace(opcode=kind) if fusion else instruction
        layer, source = self._place(instruction, around, whole, outside if fusion else around)
        return self.made.collectives.setdefault(
            (kind, axes, layer), OnWire(kind, axes, layer, source)
        )

    def _place(
        self, one: Instruction, around: Mapping, whole: Instruction, outside: Mapping
    ) -> tuple[str, str]:
        """Returns the layer and the line that an instruction is of, or the fusion around it."""
        site = Site(one, around, 1, False, False, (), False)
        layer = together(layers_of(self.program, site))
        if not layer:
            near = site._replace(instruction=whole, computation=outside)
            layer = nearest_layer(self.program, near) or "unknown"
        return layer, source_line(source_frames(self.program, one))

    def _links(
        self, instruction: Instruction, kind: str, groups: np.ndarray | None
    ) -> tuple[int, bool]:
        """Returns the links that carry a collective at once, and whether they close into rings."""
        if not self.chip.torus_dims:
            return 1, True
        if kind == "collective-permute":
            return (2 if self.both_links else 1), True
        if colors := re.search(r"UniDirection\w*\{colors:(\d+)", instruction.attributes):
            return int(colors.group(1)), True
        if rings := instruction.attributes.count('"phase_rings":'):
            # Of a SparseCore, each one way; along a dim whose ends no link joins, back and forth.
            return rings, "_MESH" not in instruction.attributes
        dims = torus_dims(instruction.attributes)
        return 2 * dims, dims > 1 or self.mesh.is_ring(groups)

    def costliest(self, one: Instruction) -> str:
        """Returns the branch of a conditional that takes longest."""
        branches: Sequence[str] = [
            name for key in ("branch_computations", "true_computation", "false_computation")
            for name in callees(one, key)
        ]
        cost: Callable[[str], float] = lambda name: sum(  # noqa: E731
            compute_seconds(inner, self.program.computations[name], self.program, self.chip,
                            self.efficiencies)
            for inner in self.program.computations[name].values()
        )
        return max(branches, key=cost)
