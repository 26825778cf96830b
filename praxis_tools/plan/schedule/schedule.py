"""Simulates a compiled step: when each instruction runs and how long it waits for transfers.

Instructions run one after another, in the order of the compiled program. Transfers run in the
background on four resources: the links within a slice, the network between slices, and the host
link in each direction. Each resource carries one transfer at a time. A transfer overlaps with all
instructions between its start and its end instruction. If the transfer has not finished by then,
the device waits; this waiting time is called exposed.

Start reading at `_ComputationRun`, which advances the clock and has one method per kind of
instruction. `_Scheduler` adds the costs to the timeline. The cost model is in costs.py
(instructions), collective_cost.py (collectives) and copies.py (HBM bandwidth).
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
    text: str,
    chip: Chip,
    mesh: PhysicalMesh,
    efficiencies: Efficiencies = FITTED,
    *,
    both_links: bool = False,
    loop_body: str | None = None,
    skipped_loop: str | None = None,
) -> Timeline:
    """Simulates a compiled program and returns its timeline.

    Args:
      text: HLO text of the program, from `Compiled.as_text()`.
      chip: Chip for which the program was compiled.
      mesh: Positions of the devices in the topology.
      efficiencies: Fractions of the chip's peak rates that programs reach.
      both_links: Whether a collective-permute uses two links, one in each direction of a ring.
      loop_body: Name of a loop's body. If given, one iteration of this loop is simulated instead
        of the entire program.
      skipped_loop: Name of the body of a loop that is excluded from the simulation.
    """
    program = parse(text)
    scheduler = _Scheduler(program, chip, mesh, efficiencies, both_links, skipped_loop)
    scheduler.timeline.seconds = scheduler.run(loop_body or program.entry, 1)
    return scheduler.timeline


class _Scheduler:
    """Simulates the computations of a program and adds their costs to one timeline."""

    def __init__(
        self,
        program: Program,
        chip: Chip,
        mesh: PhysicalMesh,
        efficiencies: Efficiencies,
        both_links: bool,
        skipped_loop: str | None,
    ):
        self.program, self.chip, self.mesh = program, chip, mesh
        self.efficiencies, self.both_links = efficiencies, both_links
        self.skipped_loop = skipped_loop
        self.nested, self.timeline = NestedTransfers(program), Timeline()
        self.hbm = HbmTraffic(chip.hbm_bandwidth * efficiencies.hbm)

    def run(self, name: str, count: int) -> float:
        """Adds `count` runs of a computation to the timeline, and returns the seconds per run."""
        return _ComputationRun(self, name, count).seconds()

    def seconds_off_timeline(self, name: str) -> float:
        """Returns the seconds per run of a computation, without adding them to the timeline."""
        return _Scheduler(
            self.program,
            self.chip,
            self.mesh,
            self.efficiencies,
            self.both_links,
            self.skipped_loop,
        ).run(name, 1)

    def compute(self, instruction: Instruction, computation: Computation, count: int) -> float:
        """Adds an instruction other than a transfer to the timeline, and returns its seconds."""
        seconds = compute_seconds(
            instruction, computation, self.program, self.chip, self.efficiencies
        )
        flops = self._add_flops(instruction, computation, count)
        if "tpu_custom_call" in instruction.attributes and not flops and not seconds:
            self.timeline.unknown_kernels.add(instruction.name)
        if self.chip.clock is not None and seconds:
            # The compiler's cycle counts do not take the HBM bandwidth into account.
            num_bytes = bytes_moved(instruction, computation, self.program, bytes_in_hbm)
            seconds = max(seconds, num_bytes / self.hbm.bandwidth)
            self.hbm.advance(seconds, num_bytes)
        is_compute = bool(flops) or is_matmul(instruction, self.program)
        self.add_seconds(instruction, seconds * count, is_compute=is_compute)
        return seconds

    def add_seconds(
        self, instruction: Instruction, seconds: float, *, is_compute: bool = False
    ) -> None:
        """Adds an instruction's time to the timeline, as compute time or memory time."""
        if not seconds:
            return
        if is_compute:
            self.timeline.compute_seconds += seconds
        else:
            self.timeline.memory_seconds += seconds
        self.timeline.instruction_seconds[instruction.name] += seconds

    def _add_flops(self, instruction: Instruction, computation: Computation, count: int) -> int:
        """Adds the matmul flops of `count` executions of an instruction to the timeline.

        Returns:
          The flops per execution; for a fusion, the flops of all fused instructions.
        """
        if instruction.opcode in FUSIONS:
            fused = self.program.computations[callees(instruction, "calls")[0]]
            return sum(self._add_flops(inner, fused, count) for inner in fused.values())
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
        self,
        instruction: Instruction,
        computation: Computation,
        count: int,
        fusion: tuple[Instruction, Computation] | None = None,
    ) -> tuple[str, float, Transfer]:
        """Adds a collective to the timeline.

        Args:
          instruction: The collective.
          computation: Computation that contains the collective.
          count: Number of executions to add.
          fusion: Last fusion that contains the collective, and the computation that contains this
            fusion; None if the collective is not fused.

        Returns:
          (resource, seconds, transfer): The resource that the collective occupies, the seconds per
          execution, and the collective's entry in the timeline.
        """
        spec = collective_spec(
            instruction,
            computation,
            self.program,
            self.chip,
            self.mesh,
            in_fusion=fusion is not None,
            both_links=self.both_links,
        )
        seconds = collective_seconds(spec, self.chip, self.efficiencies)
        if fusion is None:
            layer = self._layer_of(instruction, computation, instruction, computation)
        else:
            last_fusion, outer = fusion
            # `nearest_layer` follows the users or operands of the fusion, depending on the opcode.
            named_by = last_fusion._replace(opcode=spec.kind)
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
        """Adds a host copy to the timeline. Returns the same tuple as `add_collective`."""
        seconds = copy.bytes / (self.chip.host_bandwidth * self.efficiencies.host)
        layer = self._layer_of(instruction, computation, instruction, computation)
        transfer = self.timeline.host_copies.setdefault(
            (copy.kind, (), layer), Transfer(copy.kind, (), layer)
        )
        transfer.add(count, seconds, copy.bytes, copy.bytes)
        return copy.kind, seconds, transfer

    def _layer_of(
        self,
        instruction: Instruction,
        computation: Computation,
        outer_instruction: Instruction,
        outer: Computation,
    ) -> str:
        """Returns an instruction's layer or, if unknown, the layer of a related instruction."""
        return (
            layer_of(self.program, instruction, computation)
            or nearest_layer(self.program, outer_instruction, outer)
            or "unknown"
        )

    def costliest_branch(self, conditional: Instruction) -> str:
        """Returns the computation of the slowest branch, ignoring collectives."""

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
                name
                for key in ("branch_computations", "true_computation", "false_computation")
                for name in callees(conditional, key)
            ),
            key=cost,
        )


class _ComputationRun:
    """Simulates one run of a computation, with a clock and the transfers in flight.

    The costs of `count` identical runs are added to the timeline.
    """

    def __init__(self, scheduler: _Scheduler, name: str, count: int):
        self._scheduler, self._count = scheduler, count
        self._computation = scheduler.program.computations[name]
        self._now = 0.0
        # Maps each resource to the time at which it becomes free.
        self._free_at: dict[str, float] = collections.defaultdict(float)
        # Maps each transfer in flight to its end time and its entry in the timeline. The key is the
        # name of the start instruction, or the chain of a fused collective.
        self._in_flight: dict[str, tuple[float, Transfer]] = {}
        # A SparseCore's async-start has no operands; the collective starts at the async-update
        # that passes the data.
        self._sparsecore_calls: dict[str, tuple[Instruction, Computation]] = {}
        # A fused collective ends with the last fusion of its chain.
        self._last_fusions = {
            collective.chain: instruction
            for instruction in self._computation.values()
            for collective in scheduler.nested.in_fusion(instruction)
        }

    def seconds(self) -> float:
        """Simulates all instructions, and returns the end time of the last instruction."""
        for instruction in self._computation.values():
            self._run(instruction)
        return self._now

    def _run(self, instruction: Instruction) -> None:
        """Simulates one instruction.

        Skip the cases on a first read. Each case either runs another computation, starts a
        transfer, waits for a transfer, or (the last case) computes.
        """
        opcode, nested = instruction.opcode, self._scheduler.nested
        is_async = opcode.endswith("-start") or opcode in ("send", "recv")
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
            # A synchronous transfer ends before the next instruction.
            if not is_async:
                self._wait(instruction, instruction.name)
        elif copy := host_copy(instruction, self._computation):
            self._start_host_copy(instruction, copy)
            if not is_async:
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
            # This loop does not run if the expert loads are even. The plan separately reports the
            # time that each round would add.
            self._scheduler.timeline.expert_round_seconds += (
                self._scheduler.seconds_off_timeline(body) * count
            )
            return
        trips = trips or 1
        self._now += trips * self._scheduler.run(body, count * trips)

    def _compute(self, instruction: Instruction) -> None:
        """Simulates a compute instruction, overlapped with the collectives fused into it."""
        collectives = self._scheduler.nested.in_fusion(instruction)
        # The first fusion of a chain starts its collective, and the last one waits for it.
        new_chains = {collective.chain for collective in collectives} - self._in_flight.keys()
        for chain, inner, computation in collectives:
            if chain in new_chains:
                new_chains.discard(chain)
                self._start(
                    instruction,
                    chain,
                    *self._scheduler.add_collective(
                        inner,
                        computation,
                        self._count,
                        (self._last_fusions[chain], self._computation),
                    ),
                )
        self._now += self._scheduler.compute(instruction, self._computation, self._count)
        for chain, *_ in collectives:
            is_last = self._last_fusions[chain].name == instruction.name
            if is_last and chain in self._in_flight:
                self._wait(instruction, chain)

    def _start_collective(
        self, instruction: Instruction, collective: Instruction, computation: Computation
    ) -> None:
        self._start(
            instruction,
            instruction.name,
            *self._scheduler.add_collective(collective, computation, self._count),
        )

    def _start_host_copy(self, instruction: Instruction, copy: HostCopy) -> None:
        self._start(
            instruction,
            instruction.name,
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
        """Waits for the transfer `key`, and counts the waiting time as exposed."""
        end, transfer = self._in_flight.pop(key)
        exposed = max(0.0, end - self._now)
        transfer.exposed_seconds += exposed * self._count
        transfer.instructions.add(instruction.name)
        self._scheduler.hbm.advance(exposed)
        self._now = max(self._now, end)
