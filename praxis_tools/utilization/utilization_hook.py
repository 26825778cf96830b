"""Adds MFU and HFU to the metrics of each step on chips whose peak is known."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from praxis_lite.core.errors import shortened
from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.step_times import HFU, MFU, STEP_TIME
from praxis_tools.explain import hlo_matmuls
from praxis_tools.explain.hlo_runs import executed
from praxis_tools.explain.hlo_text import op_name_of, parse, text_of
from praxis_tools.explain.kernels import is_kernel, kernel_flops
from praxis_tools.plan.chips import Chip
from praxis_tools.plan.topology import attached_topology
from praxis_tools.utilization.model_flops import flops_of_step


class Utilization(Hook):
    """Adds MFU and HFU to the metrics, and logs how they are computed.

    Both are flops per second divided by the chip's bfloat16 peak. MFU (model flops utilization)
    counts the matmuls of the model itself, excluding padding, pipeline bubbles, the optimizer,
    remat, and work repeated on several devices. HFU (hardware flops utilization) counts all matmuls
    in the compiled step on a device. Nothing is added on CPU or on chips that are not in the table
    in praxis_tools/plan/chips.py.

    Args:
      job: The job, placed on its mesh.
      chip: Chip of the devices. If None, the chip of the attached devices is used.
    """

    every, waits = None, False

    def __init__(self, job: JobOnMesh, chip: Chip | None = None):
        self._job = job
        self._chip = chip or attached_chip(job)
        # The flops for each batch shape, keyed by the shapes of a row.
        self._flops: dict[tuple[tuple[int, ...], ...], dict[str, float]] = {}

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if self._chip is not None:
            for spec in self._job.datasets[TRAIN].element_specs():
                self._flops[_row_shapes(spec)] = self._count(self._chip, spec)

    def _count(self, chip: Chip, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, float]:
        """Returns and logs the flops of the training step for a batch shape."""
        partitioner = self._job.partitioner
        program = flops_of_program(text_of(partitioner.train_step.lower(spec).compile()))
        flops: dict[str, float] = {HFU: program.flops}
        head = (
            f"MFU and HFU are relative to {chip.peak() / 1e12:,.4g} TFLOP/s, the bfloat16 peak of "
            f"{chip.name}. Per step and device, the compiled step has "
            f"{program.flops / 1e12:,.4g} TFLOP of matmuls (HFU), and "
        )
        try:
            model = flops_of_step(partitioner, spec)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._loop.note(
                f"{head}MFU is unknown, because the model cannot be traced for one device: "
                f"{shortened(reason, 300)}"
            )
            return flops
        # If the compiler merged matmuls, the compiled step has fewer flops than the model.
        on_device = model.flops / partitioner.mesh.size + program.useful_kernels
        flops[MFU] = min(on_device, program.flops)
        lower_bound = "; a loop of unknown length is counted as one iteration" * model.at_least
        self._loop.note(
            f"{head}the model needs {flops[MFU] / 1e12:,.4g} TFLOP (MFU, excluding padding, "
            f"remat and the optimizer){lower_bound}"
        )
        return flops

    def add_metrics(self, metrics: StepMetrics) -> dict[str, float]:
        if self._chip is None:
            return {}
        seconds, peak = metrics.line[STEP_TIME], self._chip.peak()
        counts = self._flops[_row_shapes(metrics.inputs)]
        return {name: flops / seconds / peak for name, flops in counts.items()}


def _row_shapes(batch: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape[1:] for x in jax.tree.leaves(dict(batch)))


@dataclasses.dataclass(frozen=True)
class ProgramFlops:
    """The matmul flops of a compiled function on one device.

    Attributes:
      flops: Flops of all matmuls, including known kernels (splash attention, cuDNN attention).
      useful_kernels: Flops of these kernels, excluding recomputation.
    """

    flops: int
    useful_kernels: int


def flops_of_program(text: str) -> ProgramFlops:
    """Returns the flops of a compiled function, counting loops of unknown length as one iteration.

    Args:
      text: HLO text of the function.
    """
    flops = useful = 0
    for site in executed(parse(text)):
        instruction, computation = site.instruction, site.computation
        flops += site.num_runs * hlo_matmuls.matmul_flops(instruction, computation)
        if is_kernel(instruction):
            flops += site.num_runs * kernel_flops(instruction, computation)
            if RECOMPUTED not in op_name_of(instruction):
                useful += site.num_runs * kernel_flops(instruction, computation, of_model=True)
    return ProgramFlops(flops, useful)


def attached_chip(job: JobOnMesh) -> Chip | None:
    """Returns the chip of the job's mesh; None on CPU and for chips with an unknown peak."""
    devices = list(job.partitioner.mesh.devices.flat)
    topology = None if devices[0].platform == "cpu" else attached_topology(devices)
    return None if topology is None else topology.chip
