"""`praxis plan`: predicts the time and memory of an experiment on any topology."""

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.job_dir import open_for_reading
from praxis_lite.modes.job_from_command import experiment_of
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write, names

if TYPE_CHECKING:
    from praxis_tools.plan.job_plan import Plan as JobPlan

STEPS = ("train", "eval", "decode")
_SEARCH_MINUTES = 10.0
_EXPERT_LOAD = 2.0  # Keep in sync with the default in step_plan.py, which is slow to import.


class Plan(Mode):
    """Predicts the time and memory of an experiment's steps on devices that are not attached."""

    name = "plan"
    summary = "predicts the time and memory of an experiment on devices that need not be attached"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the options for the topology, the search, --measure and the output files."""
        options.add_argument(
            "--topology",
            metavar="CHIP:SHAPE",
            help="the devices to plan for, such as v5e:16x16, cpu:8, gpu:h100:4x8",
        )
        options.add_argument(
            "--num_slices",
            metavar="N",
            type=int,
            default=1,
            help="number of slices with this topology; default: 1",
        )
        options.add_argument(
            "--steps",
            metavar="NAMES",
            type=_steps,
            default=["train"],
            help=f"steps to plan, any of {','.join(STEPS)}; default: train",
        )
        options.add_argument(
            "--batch_sizes",
            metavar="N,N",
            type=_batch_sizes,
            default=(),
            help="with --steps=decode: numbers of prompts to plan for, such as 1,8,32; default: as "
            "in the dataset",
        )
        options.add_argument(
            "--search",
            action="store_true",
            help="search for the fastest mesh, preset, remat and number of microbatches",
        )
        options.add_argument(
            "--search_minutes",
            metavar="M",
            type=float,
            default=_SEARCH_MINUTES,
            help=f"with --search: time limit of the search; default: {_SEARCH_MINUTES:g}",
        )
        options.add_argument(
            "--measure",
            action="store_true",
            help="run ten steps on the attached devices and compare them with the plan",
        )
        options.add_argument(
            "--expert_load",
            metavar="X",
            type=_load,
            default=_EXPERT_LOAD,
            help="for experts split over devices: also predict a step with this load, the maximum "
            "number of tokens that one device sends to another, relative to even loads; default: "
            f"{_EXPERT_LOAD:g}",
        )
        options.add_argument(
            "--residuals",
            metavar="FILE",
            type=file_to_write("residuals.jsonl"),
            help="file with measured and predicted seconds, to which --measure appends and which "
            "corrects plans; default: JOB/residuals.jsonl if --job_log_dir=JOB is set",
        )
        options.add_argument(
            "--html",
            metavar="FILE",
            type=file_to_write("plan.html"),
            help="write the plan as an HTML page",
        )
        options.add_argument(
            "--json",
            metavar="FILE",
            type=file_to_write("plan.json"),
            help="write the plan as JSON",
        )

    def run(
        self,
        command: CommandLine,
        *,
        topology: str | None,
        num_slices: int,
        steps: Sequence[str],
        batch_sizes: Sequence[int],
        search: bool,
        search_minutes: float,
        measure: bool,
        expert_load: float,
        residuals: AnyPath | None,
        html: AnyPath | None,
        json: AnyPath | None,
    ) -> None:
        """Plans an experiment, searches for a layout or measures steps, depending on the options.

        Raises:
          ConfigError: Options cannot be combined, the experiment is invalid, or a step does not fit
            in memory (raised after all steps have been planned).
        """
        if measure and (topology is not None or search):
            raise ConfigError(
                "--measure runs on the attached devices, so it cannot be combined with --topology "
                "or --search. Remove them."
            )
        if batch_sizes and (measure or search or "decode" not in steps):
            raise ConfigError(
                f"--batch_sizes={','.join(map(str, batch_sizes))} requires --steps=decode, and "
                "cannot be combined with --search or --measure."
            )
        if topology is None and not measure:
            raise ConfigError(
                "`praxis plan` requires the devices to plan for: --topology=CHIP:SHAPE, such as "
                "--topology=v5e:16x16."
            )
        if residuals is None and command.job_log_dir is not None:
            job_dir = open_for_reading(command.job_log_dir, writes=measure)
            residuals = job_dir.shown(job_dir.residuals_jsonl)
        if measure:
            launched = experiment_of(command)

            from praxis_lite.config.build import build
            from praxis_tools.plan.attached import measure as measure_steps

            measure_steps(build(launched.config), file=json, residuals=residuals)
            return
        assert topology is not None  # Checked above.
        if search:
            launched = experiment_of(command)

            from praxis_tools.plan.job_plan import compiling_for
            from praxis_tools.plan.search.search import search as search_layouts
            from praxis_tools.plan.topology import topology_of

            _avoid_accelerators()
            chosen = topology_of(topology, num_slices)
            with compiling_for(chosen):
                search_layouts(
                    launched, command.packages, chosen, minutes=search_minutes, file=json
                )
        else:
            _avoid_accelerators()
            plan = plan_experiment(
                command,
                functools.partial(print, flush=True),
                topology,
                num_slices,
                steps,
                batch_sizes,
                residuals,
                expert_load,
            )
            if html is not None:
                write_atomically(html, plan.page().encode())
                print(f"\nOpen this page in a browser: {html.absolute()}")
            if json is not None:
                write_atomically(json, plan.json_text().encode())
            plan.require_fit()


def plan_experiment(
    command: CommandLine,
    print_text: Callable[[str], None],
    topology: str,
    num_slices: int,
    steps: Sequence[str],
    batch_sizes: Sequence[int] = (),
    residuals: AnyPath | None = None,
    expert_load: float = _EXPERT_LOAD,
) -> "JobPlan":
    """Plans an experiment's steps. Steps that exceed the device memory do not raise an error.

    Args:
      command: The parsed command line, which names the experiment.
      print_text: Function called with each section of the text as soon as it is known.
      topology: Value of --topology.
      num_slices: Value of --num_slices.
      steps: Names of the steps, a subset of `STEPS`.
      batch_sizes: Batch sizes, in prompts, for which to plan decoding. If empty, the dataset's
        batch size is used.
      residuals: File with earlier measurements for correcting the plan, or None.
      expert_load: Value of --expert_load.

    Raises:
      ConfigError: The topology is unknown, the mesh does not use all devices of the topology, or
        the experiment is invalid.
    """
    launched = experiment_of(command)

    from praxis_lite.config.build import build
    from praxis_tools.plan.job_plan import plan_job
    from praxis_tools.plan.topology import topology_of

    devices = topology_of(topology, num_slices)
    job = build(launched.config)
    return plan_job(
        job,
        devices,
        steps,
        print_text,
        experiment=launched.experiment,
        batch_sizes=batch_sizes,
        residuals=residuals,
        expert_load=expert_load,
    )


def _avoid_accelerators() -> None:
    """Makes JAX use the CPU, because planning requires no accelerator."""
    if "JAX_PLATFORMS" not in os.environ:
        import jax

        jax.config.update("jax_platforms", "cpu")


def _steps(text: str) -> list[str]:
    if not set(names(text)) <= set(STEPS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not supported by `praxis plan`; expected names from {', '.join(STEPS)}"
        )
    return names(text)


def _batch_sizes(text: str) -> list[int]:
    sizes = names(text)
    if not sizes or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid; expected positive numbers of prompts, such as 1,8,32"
        )
    return list(map(int, sizes))


def _load(text: str) -> float:
    load = float(text)
    if not 1.0 <= load < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text} is not valid; expected 1 (even loads) or more, such as 1.5"
        )
    return load
