"""`main.py --mode=plan`: predicts an experiment on devices that are not attached."""

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.whole_files import write_whole
from praxis_lite.job.job_dir import open_for_reading
from praxis_lite.modes.launched import experiment_of
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import file_to_write, names

if TYPE_CHECKING:
    from praxis_tools.plan.job_plan import Plan

STEPS = ("train", "eval", "decode")
_SEARCH_MINUTES = 10.0
_EXPERT_LOAD = 2.0  # As in step_plan.py, which is slow to import.


class Plan(Mode):
    """Predicts time, memory and cost of an experiment's steps on a topology."""

    name = "plan"
    summary = "predicts the steps of an experiment on devices that need not be attached"

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the options of the topology, the search, --measure, and files."""
        options.add_argument(
            "--topology", metavar="CHIP:SHAPE",
            help="the devices to plan for, such as v5e:16x16, cpu:8, gpu:h100:4x8",
        )
        options.add_argument(
            "--num_slices", metavar="N", type=int, default=1,
            help="the number of slices of that topology; default: 1",
        )
        options.add_argument(
            "--steps", metavar="NAMES", type=_steps, default=["train"],
            help=f"names among {','.join(STEPS)}; default: train",
        )
        options.add_argument(
            "--batch_sizes", metavar="N,N", type=_batch_sizes, default=(),
            help="with --steps=decode: plan for each of these numbers of prompts, such as 1,8,32; "
            "default: the dataset's",
        )
        options.add_argument(
            "--search", action="store_true",
            help="look for the fastest mesh, preset, remat and micro-batches",
        )
        options.add_argument(
            "--search_minutes", metavar="M", type=float, default=_SEARCH_MINUTES,
            help=f"with --search: how long to search; default: {_SEARCH_MINUTES:g}",
        )
        options.add_argument(
            "--measure", action="store_true",
            help="run ten steps on the attached devices, and compare with the plan",
        )
        options.add_argument(
            "--expert_load", metavar="X", type=_load, default=_EXPERT_LOAD,
            help="for experts split over devices: also predict a step at this load, the most "
            "tokens that a device sends to another one's experts over the number with even loads; "
            f"default: {_EXPERT_LOAD:g}",
        )
        options.add_argument(
            "--residuals", metavar="FILE", type=file_to_write("residuals.jsonl"),
            help="a file of measured and predicted seconds, to which --measure adds a line, and "
            "which corrects plans; default: JOB/residuals.jsonl, with --job_log_dir",
        )
        options.add_argument(
            "--html", metavar="FILE", type=file_to_write("plan.html"),
            help="where to write the plan as an HTML page",
        )
        options.add_argument(
            "--json", metavar="FILE", type=file_to_write("plan.json"),
            help="where to write the plan as JSON",
        )

    def run(
        self, command: CommandLine, *, topology: str | None, num_slices: int,
        steps: Sequence[str], batch_sizes: Sequence[int], search: bool, search_minutes: float,
        measure: bool, expert_load: float, residuals: Path | None, html: Path | None,
        json: Path | None,
    ) -> None:
        """Plans; raises ConfigError, after all steps, if any does not fit."""
        if measure and (topology is not None or search):
            raise ConfigError(
                "--measure runs on the attached devices: leave --topology and --search out."
            )
        if batch_sizes and (measure or search or "decode" not in steps):
            raise ConfigError(
                f"--batch_sizes={','.join(map(str, batch_sizes))} is for decoding: add "
                "--steps=decode, without --search and --measure."
            )
        if topology is None and not measure:
            raise ConfigError(
                "--mode=plan needs --topology=CHIP:SHAPE, the devices to plan for, such as "
                "--topology=v5e:16x16."
            )
        if residuals is None and command.job_log_dir is not None:
            residuals = open_for_reading(command.job_log_dir, writes=measure).residuals_jsonl
        if measure:
            launched = experiment_of(command)

            from praxis_lite.config.build import build
            from praxis_tools.plan.attached import measure as measure_steps

            measure_steps(build(launched.config), file=json, residuals=residuals)
        elif search:
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
            plan = planned(
                command, functools.partial(print, flush=True), topology, num_slices, steps,
                batch_sizes, residuals, expert_load,
            )
            if html is not None:
                write_whole(html, plan.page().encode())
                print(f"\nThe page to look at in a browser: {html.absolute()}")
            if json is not None:
                write_whole(json, plan.json_text().encode())
            plan.require_fit()


def planned(
    command: CommandLine, print_text: Callable[[str], None], topology: str, num_slices: int,
    steps: Sequence[str], batch_sizes: Sequence[int] = (), residuals: Path | None = None,
    expert_load: float = _EXPERT_LOAD,
) -> "Plan":
    """Returns the plan of a command line's experiment, whether it fits or not.

    Args:
      print_text: called with each part of the text as soon as it is known.
      topology, num_slices, steps, batch_sizes, residuals, expert_load: as the options of these
        names.

    Raises:
      ConfigError: there is no such topology, the mesh does not fill it, or training would raise it.
    """
    launched = experiment_of(command)

    from praxis_lite.config.build import build
    from praxis_tools.plan.job_plan import plan_job
    from praxis_tools.plan.topology import topology_of

    devices = topology_of(topology, num_slices)
    job = build(launched.config)
    return plan_job(
        job, devices, steps, print_text, experiment=launched.experiment, batch_sizes=batch_sizes,
        residuals=residuals, expert_load=expert_load,
    )


def _avoid_accelerators() -> None:
    """Makes JAX use the CPU; a plan needs no accelerator."""
    if "JAX_PLATFORMS" not in os.environ:
        import jax

        jax.config.update("jax_platforms", "cpu")


def _steps(text: str) -> list[str]:
    if not set(names(text)) <= set(STEPS):
        raise argparse.ArgumentTypeError(
            f"{text!r} with --mode=plan; expected names of steps: {', '.join(STEPS)}"
        )
    return names(text)


def _batch_sizes(text: str) -> list[int]:
    sizes = names(text)
    if not sizes or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} with --mode=plan; expected numbers of prompts, 1 or more, such as 1,8,32"
        )
    return list(map(int, sizes))


def _load(text: str) -> float:
    load = float(text)
    if not 1.0 <= load < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text} with --mode=plan; expected 1 (even loads) or more, such as 1.5"
        )
    return load
