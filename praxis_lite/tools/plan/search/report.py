"""The result of a search: a table, a picture, and an experiment class that runs as it is."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from praxis_lite.files.whole_files import write_picture
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.tools.plan.report import seconds_text
from praxis_lite.tools.plan.search.candidates import Candidate
from praxis_lite.tools.plan.step_plan import StepPlan
from praxis_lite.tools.plan.topology import Topology

Plans = Sequence[tuple[Candidate, StepPlan]]


class WrittenClass(NamedTuple):
    """The source of an experiment class."""

    name: str
    text: str


def front(plans: Plans) -> list[StepPlan]:
    """Returns the fitting plans that no other beats in both memory and time, the fastest first."""
    fitting = sorted(
        (plan for _, plan in plans if plan.fits and plan.step_seconds is not None),
        key=lambda plan: (plan.step_seconds, plan.peak_bytes_per_device),
    )
    result, least = [], math.inf
    for plan in fitting:
        if plan.peak_bytes_per_device < least:
            result.append(plan)
            least = plan.peak_bytes_per_device
    return result


def table(plans: Plans) -> str:
    """Returns a line per plan, the fastest first; '*' marks the Pareto front of memory and time."""
    best = front(plans)
    lines = [f"  {'step':>9}  {'GiB':>7}  {'MFU':>6}  {'fits':<5} layout"]
    for item, plan in sorted(plans, key=lambda pair: pair[1].step_seconds or math.inf):
        seconds = seconds_text(plan.step_seconds) if plan.step_seconds else "-"
        mfu = f"{plan.mfu:.1%}" if plan.mfu is not None else "-"
        mark = "*" if any(plan is other for other in best) else " "
        lines.append(
            f"{mark} {seconds:>9}  {plan.peak_bytes_per_device / 2**30:>7.2f}  {mfu:>6}  "
            f"{'yes' if plan.fits else 'no':<5} {item.name}"
        )
    return "\n".join(lines)


def picture(plans: Plans, topology: Topology, path: Path) -> None:
    """Draws memory against time, with the Pareto front and the device's memory, as a PNG."""
    figures = optional_module("matplotlib.figure", str(path))
    figure = figures.Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    timed = [(element, plan) for element, plan in plans if plan.step_seconds is not None]
    for is_fitting, colour in ((True, "tab:blue"), (False, "tab:red")):
        some = [plan for _, plan in timed if plan.fits == is_fitting]
        axes.scatter(
            [plan.peak_bytes_per_device / 2**30 for plan in some],
            [plan.step_seconds for plan in some], color=colour,
            label="fits" if is_fitting else "does not fit",
        )
    for item, plan in timed:
        axes.annotate(
            item.name, (plan.peak_bytes_per_device / 2**30, plan.step_seconds), fontsize=6,
            xytext=(4, 3), textcoords="offset points",
        )
    best = front(plans)
    axes.plot(
        [plan.peak_bytes_per_device / 2**30 for plan in best],
        [plan.step_seconds for plan in best], color="tab:blue", linewidth=1, label="Pareto front",
    )
    axes.axvline(topology.chip.hbm_bytes / 2**30, color="tab:red", linestyle=":", linewidth=1)
    axes.set(xlabel="GiB per device", ylabel="predicted seconds per step", title=topology.name)
    axes.legend()
    write_picture(path, figure, dpi=130)


def written_class(
    experiment: str, topology: Topology, settings: Sequence[str],
    best: "tuple[Candidate, StepPlan]",
) -> WrittenClass:
    """Returns the source of a class that is `experiment` with `settings`, for --exp."""
    module, _, base = experiment.rpartition(".")
    name = f"{base}Planned"
    candidate, plan = best
    local = "\n".join(f"    {setting!r}," for setting in settings)
    slices = f", {topology.num_slices} slices" if topology.num_slices > 1 else ""
    text = f'''"""What --mode=plan --search found for {experiment} on {topology.name}{slices}."""

from {module} import {base}
from praxis_lite import register
from praxis_lite.run.config.class_attributes import configured

SETTINGS = [
{local}
]


@register
class {name}({base}):
    """{candidate.name}: {seconds_text(plan.step_seconds)} a step predicted.

    {plan.peak_bytes_per_device / 2**30:.2f} GiB per device.
    """

    def config(self):
        return configured({base}, SETTINGS, {{{module.partition(".")[0]!r}}})
'''
    return WrittenClass(name, text)
