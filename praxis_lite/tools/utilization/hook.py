"""MFU and HFU of each step, where the chips are known."""

import contextlib
import dataclasses
from collections.abc import Iterator

from praxis_lite.core.errors import shown
from praxis_lite.core.jaxprs import RECOMPUTED
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.run.trainer.hooks.hook import Hook, StepMetrics
from praxis_lite.run.trainer.hooks.loop import Loop
from praxis_lite.run.trainer.job_on_mesh import JobOnMesh
from praxis_lite.run.trainer.metrics.step_times import HFU, MFU, STEP_TIME
from praxis_lite.tools.explain import hlo_matmuls
from praxis_lite.tools.explain.hlo_runs import executed
from praxis_lite.tools.explain.hlo_text import op_name_of, parse
from praxis_lite.tools.explain.kernels import is_kernel, kernel_flops
from praxis_lite.tools.plan.chips import Chip
from praxis_lite.tools.plan.topology import attached_topology
from praxis_lite.tools.utilization.model_flops import flops_of_step


class Utilization(Hook):
    """Adds the shares of the chips' peak in bfloat16 that a step uses, and says how they count.

    MFU (model flops utilization) is of the matmuls of the model as it is written, over all devices:
    without padding, idle stages of a pipeline and the optimizer, and without what several devices
    compute alike or the backward pass computes again. HFU (hardware flops utilization) is of the
    matmuls of the compiled program on a device, all of them. Either is divided by the seconds of
    the step and the peak of the chip. Nothing is added on CPU and on chips that the table
    (tools/plan/chips.py) lacks.

    Args:
      chip: of the devices; None: the chip that is attached.
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
            words = " ".join(str(error).split()) or type(error).__name__
            self._loop.note(
                f"{head}no MFU, for the model cannot be traced for a single device: "
                f"{shown(words, 300)}"
            )
            return
        # A compiler that merges matmuls makes fewer than were written.
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
      flops: all of them, those of kernels that are known (splash attention, cuDNN's) included.
      useful_kernels: of those kernels, without what is computed again.
    """

    flops: int
    useful_kernels: int


def flops_of_program(text: str) -> ProgramFlops:
    """Returns the flops of a program's text; loops of unknown length count as a single pass."""
    flops = useful = 0
    for site in executed(parse(text)):
        instruction, count = site.instruction, site.count
        flops += count * hlo_matmuls.matmul_flops(instruction, site.computation)
        if is_kernel(instruction):
            kernel = count * kernel_flops(instruction, site.computation)
            flops += kernel
            if RECOMPUTED not in op_name_of(instruction):
                useful += count * kernel_flops(instruction, site.computation, of_model=True)
    return ProgramFlops(flops, useful)


def attached_chip(job: JobOnMesh) -> Chip | None:
    """Returns the chip of the job's mesh, or None on CPU and for a kind that the table lacks."""
    devices = list(job.partitioner.mesh.devices.flat)
    topology = None if devices[0].platform == "cpu" else attached_topology(devices)
    return topology and topology.chip
