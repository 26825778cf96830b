"""Simulates a compiled step on a clock: when each instruction runs, and what it waits for.

The overlap rule: instructions run one after another, in the order of the compiled program. Next to
them four resources carry transfers, each one transfer at a time: the links within a slice, the
network between slices, and the link to the host in either direction. Instructions between the start
and the end of a transfer overlap with it. What is left of the transfer at its end is waited for:
its exposed seconds.

Where to look: `_ComputationRun` is where time passes, with one method per kind of instruction.
`_Scheduler` adds up costs over the program. The costs themselves are in costs.py (instructions),
collective_cost.py, and copies.py (bandwidth of HBM).
"""

import collections

from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_tools.explain import hlo, hlo_matmuls
from praxis_tools.explain.hlo_layers import layer_of, nearest_layer
from praxis_tools.explain.hlo_runs import is_extra_exchange, trip_count
from praxis_tools.explain.hlo_text import (
    Computation,
    Instruction,
    Program,
    callees,
    op_name_of,
    parse,
)
from praxis_tools.explain.kernels import is_kernel, kernel_flops
from praxis_tools.plan.chips import Chip
from praxis_tools.plan.costs import (
    FITTED,
    FUSIONS,
    Efficiencies,
    bytes_moved,
    compute_seconds,
    is_matmul,
)
from praxis_tools.plan.schedule.collective_cost import (
    collective_seconds,
    collective_spec,
    is_slice_transfer,
)
from praxis_tools.plan.schedule.copies import (
    HBM_COPY_DONES,
    HBM_COPY_STARTS,
    HbmTraffic,
    HostCopy,
    bytes_in_hbm,
    host_copy,
)
from praxis_tools.plan.schedule.nested import NestedTransfers
from praxis_tools.plan.schedule.timeline import Timeline, Transfer
from praxis_tools.plan.topology import PhysicalMesh

_LINKS, _NETWORK = "links within a slice", "network between slices"


def schedule(
    text: str, chip: Chip, mesh: PhysicalMesh, efficiencies: Efficiencies = FITTED, *,
    both_links: bool = False, loop_body: str | None = None, skipped_loop: str | None = None,
) -> Timeline:
    """Returns the timeline of a compiled program.

    Args:
      text: the program, as `Compiled.as_text()` writes it.
      both_links: whether a collective-permute sends in both directions of a ring, over two links.
      loop_body: if given, only one iteration of the loop with this body is scheduled.
      skipped_loop: body of a loop that takes no time.
    """
    program = parse(text)
    scheduler = _Scheduler(program, chip, mesh, efficiencies, both_links, skipped_loop)
    scheduler.timeline.seconds = scheduler.run(loop_body or program.entry, 1)
    return scheduler.timeline


class _Scheduler:
    """Runs computations and adds the cost of their instructions to one timeline."""

    def __init__(
        self, program: Program, chip: Chip, mesh: PhysicalMesh, efficiencies: Efficiencies,
        both_links: bool, skipped_loop: str | None,
    ):
        self.program, self.chip, self.mesh = program, chip, mesh
        self.efficiencies, self.both_links = efficiencies, both_links
        self.skipped_loop = skipped_loop
        self.nested, self.timeline = NestedTransfers(program), Timeline()
        self.hbm = HbmTraffic(chip.hbm_bandwidth * efficiencies.hbm)

    def run(self, name: str, count: int) -> float:
        """Returns the seconds of a computation, and adds `count` runs of it to the timeline."""
        return _ComputationRun(self, name, count).seconds()

    def seconds_apart(self, name: str) -> float:
        """Returns the seconds of one run of a computation without adding them to the timeline."""
        return _Scheduler(
            self.program, self.chip, self.mesh, self.efficiencies, self.both_links,
            self.skipped_loop,
        ).run(name, 1)

    def compute(self, instruction: Instruction, computation: Computation, count: int) -> float:
        """Returns the seconds of an instruction that is not a transfer, and adds its costs."""
        seconds = compute_seconds(
            instruction, computation, self.program, self.chip, self.efficiencies
        )
        flops = self._add_flops(instruction, computation, count)
        if "tpu_custom_call" in instruction.attributes and not flops and not seconds:
            self.timeline.unknown_kernels.add(instruction.name)
        if self.chip.clock is not None and seconds:
            # The compiler's cycles leave out HBM's bandwidth, which copies in flight use too.
            moved = bytes_moved(instruction, computation, self.program, bytes_in_hbm)
            seconds = max(seconds, moved / self.hbm.bandwidth)
            self.hbm.advance(seconds, moved)
        is_compute = bool(flops) or is_matmul(instruction, self.program)
        self.add_seconds(instruction, seconds * count, is_compute=is_compute)
        return seconds

    def add_seconds(
        self, instruction: Instruction, seconds: float, *, is_compute: bool = False
    ) -> None:
        if not seconds:
            return
        if is_compute:
            self.timeline.compute_seconds += seconds
        else:
            self.timeline.memory_seconds += seconds
        self.timeline.instruction_seconds[instruction.name] += seconds

    def _add_flops(self, instruction: Instruction, computation: Computation, count: int) -> int:
        """Returns the matmul flops of an instruction, with its fusion, and adds `count` times."""
        if instruction.opcode in FUSIONS:
            inside = self.program.computations[callees(instruction, "calls")[0]]
            return sum(self._add_flops(inner, inside, count) for inner in inside.values())
        timeline = self.timeline
        flops, dtype = hlo_matmuls.matmul_flops(instruction, computation), "bf16"
        if flops:
            dtype = hlo_matmuls.matmul_type(instruction, computation)
        elif is_kernel(instruction):
            flops = kernel_flops(instruction, computation)
            timeline.kernel_flops += flops * count
        if flops:
            timeline.flops += flops * count
            timeline.flops_by_type[dtype] += flops * count
            if RECOMPUTED in op_name_of(instruction):
                timeline.recomputed_flops += flops * count
        return flops

    def add_collective(
        self, instruction: Instruction, computation: Computation, count: int,
        fusion: Instruction | None = None, outer: Computation | None = None,
    ) -> tuple[str, float, Transfer]:
        """Adds a collective to the timeline.

        Args:
          fusion: the last fusion, in `outer`, that carries the collective, if it is fused.

        Returns:
          The resource that it occupies, for how many seconds, and its entry in the timeline.
        """
        spec = collective_spec(
            instruction, computation, self.program, self.chip, self.mesh,
            in_fusion=fusion is not None, both_links=self.both_links,
        )
        seconds = collective_seconds(spec, self.chip, self.efficiencies)
        if fusion is None:
            layer = self._layer_of(instruction, computation, instruction, computation)
        else:
            named_by = fusion._replace(opcode=spec.kind)
            layer = self._layer_of(instruction, computation, named_by, outer)
        transfer = self.timeline.collectives.setdefault(
            (spec.kind, spec.axes, layer), Transfer(spec.kind, spec.axes, layer)
        )
        transfer.crosses |= spec.crosses
        transfer.add(count, seconds, spec.sent_bytes, spec.result_bytes)
        return _NETWORK if spec.crosses else _LINKS, seconds, transfer

    def add_host_copy(
        self, instruction: Instruction, computation: Computation, copy: HostCopy, count: int
    ) -> tuple[str, float, Transfer]:
        """Adds a copy to or from the host to the timeline; returns as `add_collective`."""
        seconds = copy.bytes / (self.chip.host_bandwidth * self.efficiencies.host)
        layer = self._layer_of(instruction, computation, instruction, computation)
        transfer = self.timeline.host_copies.setdefault(
            (copy.kind, (), layer), Transfer(copy.kind, (), layer)
        )
        transfer.add(count, seconds, copy.bytes, copy.bytes)
        return copy.kind, seconds, transfer

    def _layer_of(
        self, instruction: Instruction, computation: Computation, outer_instruction: Instruction,
        outer: Computation,
    ) -> str:
        """Returns the layer of an instruction, else the nearest one to the fusion around it."""
        return (
            layer_of(self.program, instruction, computation)
            or nearest_layer(self.program, outer_instruction, outer) or "unknown"
        )

    def costliest_branch(self, conditional: Instruction) -> str:
        """Returns the name of the branch whose instructions take longest, collectives aside."""
        def cost(name: str) -> float:
            computation = self.program.computations[name]
            return sum(
                compute_seconds(
                    instruction, computation, self.program, self.chip, self.efficiencies
                )
                for instruction in computation.values()
            )

        return max(
            (
                name for key in ("branch_computations", "true_computation", "false_computation")
                for name in callees(conditional, key)
            ),
            key=cost,
        )


class _ComputationRun:
    """One run of a computation: its clock, and the transfers that are in flight."""

    def __init__(self, scheduler: _Scheduler, name: str, count: int):
        self._scheduler, self._count = scheduler, count
        self._computation = scheduler.program.computations[name]
        self._now = 0.0
        self._free_at: dict[str, float] = collections.defaultdict(float)  # By resource.
        # By the instruction, or chain of fusions, that started a transfer: its end, and its entry.
        self._in_flight: dict[str, tuple[float, Transfer]] = {}
        # A SparseCore's call is started first, and gets its data by a later async-update.
        self._sparsecore_calls: dict[str, tuple[Instruction, Computation]] = {}
        # By chain: the last fusion that carries a fused collective, where the collective ends.
        self._last_fusions = {
            collective.chain: instruction
            for instruction in self._computation.values()
            for collective in scheduler.nested.in_fusion(instruction)
        }

    def seconds(self) -> float:
        for instruction in self._computation.values():
            self._run(instruction)
        return self._now

    def _run(self, instruction: Instruction) -> None:
        opcode, nested = instruction.opcode, self._scheduler.nested
        starts_only = opcode.endswith("-start") or opcode in ("send", "recv")
        first_operand = instruction.operands[0] if instruction.operands else ""
        if opcode == "while":
            self._run_loop(instruction)
        elif opcode == "conditional":
            branch = self._scheduler.costliest_branch(instruction)
            self._now += self._scheduler.run(branch, self._count)
        elif opcode == "call":
            callee = callees(instruction, "to_apply")[0]
            self._now += self._scheduler.run(callee, self._count)
        elif opcode == "async-start" and (collective := nested.in_async_call(instruction)):
            if instruction.operands:
                self._start_collective(instruction, *collective)
            else:
                self._sparsecore_calls[instruction.name] = collective
        elif opcode == "async-start" and (copy := nested.host_copy_in_async_call(instruction)):
            self._start_host_copy(instruction, copy)
        elif opcode == "async-update" and first_operand in self._sparsecore_calls:
            self._start_collective(instruction, *self._sparsecore_calls.pop(first_operand))
        elif opcode.removesuffix("-start") in hlo.KINDS or is_slice_transfer(instruction):
            self._start_collective(instruction, instruction, self._computation)
            if not starts_only:
                self._wait(instruction, instruction.name)
        elif copy := host_copy(instruction, self._computation):
            self._start_host_copy(instruction, copy)
            if not starts_only:
                self._wait(instruction, instruction.name)
        elif opcode in HBM_COPY_STARTS:
            self._scheduler.hbm.start(instruction)
        elif opcode.endswith("-done") and first_operand in self._in_flight:
            self._wait(instruction, first_operand)
        elif opcode in HBM_COPY_DONES:
            seconds = self._scheduler.hbm.wait_for(first_operand)
            self._scheduler.add_seconds(instruction, seconds * self._count)
            self._now += seconds
        else:
            self._compute(instruction)

    def _run_loop(self, loop: Instruction) -> None:
        (body,) = callees(loop, "body")
        if body == self._scheduler.skipped_loop:
            return
        program, count = self._scheduler.program, self._count
        trips = trip_count(program, self._computation, loop)
        if trips is None and is_extra_exchange(program, loop):
            # With even loads this loop does not run; the plan reports what one round would add.
            self._scheduler.timeline.expert_turn_seconds += (
                self._scheduler.seconds_apart(body) * count
            )
            return
        trips = trips or 1
        self._now += trips * self._scheduler.run(body, count * trips)

    def _compute(self, instruction: Instruction) -> None:
        """Runs an instruction that computes, with the collectives of its fusion next to it."""
        collectives = self._scheduler.nested.in_fusion(instruction)
        new = {collective.chain for collective in collectives} - self._in_flight.keys()
        for chain, inner, computation in collectives:
            if chain in new:
                new.discard(chain)
                self._start(instruction, chain, *self._scheduler.add_collective(
                    inner, computation, self._count, self._last_fusions[chain], self._computation
                ))
        self._now += self._scheduler.compute(instruction, self._computation, self._count)
        for chain, *_ in collectives:
            is_last = self._last_fusions[chain].name == instruction.name
            if is_last and chain in self._in_flight:
                self._wait(instruction, chain)

    def _start_collective(
        self, instruction: Instruction, collective: Instruction, computation: Computation
    ) -> None:
        self._start(
            instruction, instruction.name,
            *self._scheduler.add_collective(collective, computation, self._count),
        )

    def _start_host_copy(self, instruction: Instruction, copy: HostCopy) -> None:
        self._start(
            instruction, instruction.name,
            *self._scheduler.add_host_copy(instruction, self._computation, copy, self._count),
        )

    def _start(
        self, instruction: Instruction, key: str, resource: str, seconds: float, transfer: Transfer
    ) -> None:
        """Starts a transfer as soon as its resource is free."""
        transfer.instructions.add(instruction.name)
        self._free_at[resource] = max(self._now, self._free_at[resource]) + seconds
        self._in_flight[key] = self._free_at[resource], transfer

    def _wait(self, instruction: Instruction, key: str) -> None:
        """Waits for the end of the transfer that was started under `key`."""
        end, transfer = self._in_flight.pop(key)
        exposed = max(0.0, end - self._now)
        transfer.exposed_seconds += exposed * self._count
        transfer.instructions.add(instruction.name)
        self._scheduler.hbm.advance(exposed)
        self._now = max(self._now, end)
