"""Adds MFU and HFU to each step's metrics, if the chips are known."""

import contextlib
import dataclasses
from collections.abc import Iterator

from praxis_lite.core.errors import shown
from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.step_times import HFU, MFU, STEP_TIME
from praxis_tools.explain import hlo_matmuls
from praxis_tools.explain.hlo_runs import executed
from praxis_tools.explain.hlo_text import op_name_of, parse
from praxis_tools.explain.kernels import is_kernel, kernel_flops
from praxis_tools.plan.chips import Chip
from praxis_tools.plan.topology import attached_topology
from praxis_tools.utilization.model_flops import flops_of_step


class Utilization(Hook):
    """Adds the shares of the chips' bfloat16 peak that a step uses, and notes how they count.

    MFU (model flops utilization) counts the matmuls of the model as it is written, over all
    devices: without padding, idle pipeline stages, the optimizer, recomputation (remat), and work
    that several devices repeat. HFU (hardware flops utilization) counts all matmuls of the compiled
    program on a device. Both are flops over the seconds of the step and the chip's peak. Nothing is
    added on CPU, and on chips that the table (praxis_tools/plan/chips.py) lacks.

    Args:
      chip: the devices' chip; None: that of the attached devices.
    """

    every, waits = None, False

    def __init__(self, job: JobOnMesh, chip: Chip | None = None):
        self._job = job
        self._chip = chip or attached_chip(job)
        self._flops: dict[str, float] = {}

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._loop = loop

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if self._chip is not None:
            self._count(self._chip)

    def _count(self, chip: Chip) -> None:
        partitioner = self._job.partitioner
        step, spec = partitioner.train_step, self._job.datasets[TRAIN].element_spec()
        program = flops_of_program(step.lower(spec).compile().as_text())
        self._flops = {HFU: program.flops}
        head = (
            f"MFU and HFU are shares of {chip.peak() / 1e12:,.4g} TFLOP/s, the peak of {chip.name} "
            f"in bfloat16. A step has on each device {program.flops / 1e12:,.4g} TFLOP of matmuls "
            "that the compiled program makes (HFU), and "
        )
        try:
            model = flops_of_step(partitioner, spec)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._loop.note(
                f"{head}no MFU, for the model cannot be traced for a single device: "
                f"{shown(reason, 300)}"
            )
            return
        # A compiler that merges matmuls executes fewer flops than the model has.
        on_device = model.flops / partitioner.mesh.size + program.useful_kernels
        self._flops[MFU] = min(on_device, program.flops)
        unknown = "; a loop of unknown length counts as a single pass" * model.at_least
        self._loop.note(
            f"{head}{self._flops[MFU] / 1e12:,.4g} TFLOP that the model needs (MFU: without "
            f"padding, recomputation and the optimizer){unknown}"
        )

    def add_metrics(self, metrics: StepMetrics) -> dict[str, float]:
        seconds = metrics.line[STEP_TIME]
        return {
            name: flops / seconds / self._chip.peak() for name, flops in self._flops.items()
        }


@dataclasses.dataclass(frozen=True)
class ProgramFlops:
    """The matmul flops of a compiled program on a device.

    Attributes:
      flops: all matmul flops, including those of known kernels (splash attention, cuDNN's).
      useful_kernels: the flops of these kernels without recomputation.
    """

    flops: int
    useful_kernels: int


def flops_of_program(text: str) -> ProgramFlops:
    """Returns the flops of a program's text; a loop of unknown length counts as one iteration."""
    flops = useful = 0
    for site in executed(parse(text)):
        instruction, computation = site.instruction, site.computation
        flops += site.count * hlo_matmuls.matmul_flops(instruction, computation)
        if is_kernel(instruction):
            flops += site.count * kernel_flops(instruction, computation)
            if RECOMPUTED not in op_name_of(instruction):
                useful += site.count * kernel_flops(instruction, computation, of_model=True)
    return ProgramFlops(flops, useful)


def attached_chip(job: JobOnMesh) -> Chip | None:
    """Returns the chip of the job's mesh, or None on CPU and for chips that the table lacks."""
    devices = list(job.partitioner.mesh.devices.flat)
    topology = None if devices[0].platform == "cpu" else attached_topology(devices)
    return topology and topology.chip
