"""Formats the results of a search: a table, a plot and an experiment with the best layout."""

import math
from collections.abc import Sequence
from pathlib import Path

from praxis_lite.host.atomic_files import write_picture
from praxis_lite.host.optional_packages import optional_module
from praxis_tools.plan.plan_text import seconds_text
from praxis_tools.plan.search.candidates import Candidate
from praxis_tools.plan.step_plan import StepPlan
from praxis_tools.plan.topology import Topology

Plans = Sequence[tuple[Candidate, StepPlan]]


def seconds_or_infinity(plan: StepPlan) -> float:
    """Returns the predicted seconds of a step, or infinity if it did not compile."""
    return math.inf if plan.step_seconds is None else plan.step_seconds


def pareto_front(plans: Plans) -> list[StepPlan]:
    """Returns the plans on the Pareto front of memory and time, fastest first.

    Plans that do not fit in memory are ignored.
    """
    fitting = sorted(
        (plan for _, plan in plans if plan.fits and plan.step_seconds is not None),
        key=lambda plan: (seconds_or_infinity(plan), plan.peak_bytes_per_device),
    )
    front: list[StepPlan] = []
    least_bytes = math.inf
    # The plans get slower, so a plan is on the front only if it needs less memory than all before.
    for plan in fitting:
        if plan.peak_bytes_per_device < least_bytes:
            front.append(plan)
            least_bytes = plan.peak_bytes_per_device
    return front


def table(plans: Plans) -> str:
    """Returns a text table of the plans, fastest first; '*' marks the Pareto front."""
    front = pareto_front(plans)
    lines = [f"  {'step':>9}  {'GiB':>7}  {'MFU':>6}  {'fits':<5} layout"]
    for candidate, plan in sorted(plans, key=lambda pair: seconds_or_infinity(pair[1])):
        seconds = seconds_text(plan.step_seconds) if plan.step_seconds else "-"
        mfu = f"{plan.mfu:.1%}" if plan.mfu is not None else "-"
        mark = "*" if any(plan is other for other in front) else " "
        lines.append(
            f"{mark} {seconds:>9}  {plan.peak_bytes_per_device / 2**30:>7.2f}  {mfu:>6}  "
            f"{'yes' if plan.fits else 'no':<5} {candidate.name}"
        )
    return "\n".join(lines)


def plot_plans(plans: Plans, topology: Topology, path: Path) -> None:
    """Writes a PNG plot of step time against memory, with the Pareto front."""
    matplotlib_figure = optional_module("matplotlib.figure", str(path))
    figure = matplotlib_figure.Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()

    def points(some_plans: Sequence[StepPlan]) -> tuple[list[float], list[float]]:
        gib = [plan.peak_bytes_per_device / 2**30 for plan in some_plans]
        return gib, [seconds_or_infinity(plan) for plan in some_plans]

    timed = [(candidate, plan) for candidate, plan in plans if plan.step_seconds is not None]
    for fits, color in ((True, "tab:blue"), (False, "tab:red")):
        axes.scatter(
            *points([plan for _, plan in timed if plan.fits == fits]),
            color=color,
            label="fits" if fits else "does not fit",
        )
    for candidate, plan in timed:
        axes.annotate(
            candidate.name,
            (plan.peak_bytes_per_device / 2**30, plan.step_seconds),
            fontsize=6,
            xytext=(4, 3),
            textcoords="offset points",
        )
    axes.plot(*points(pareto_front(plans)), color="tab:blue", linewidth=1, label="Pareto front")
    axes.axvline(topology.chip.hbm_bytes / 2**30, color="tab:red", linestyle=":", linewidth=1)
    axes.set(xlabel="GiB per device", ylabel="predicted seconds per step", title=topology.name)
    axes.legend()
    write_picture(path, figure, dpi=130)


def experiment_source(
    experiment: str, topology: Topology, settings: Sequence[str], best: tuple[Candidate, StepPlan]
) -> tuple[str, str]:
    """Returns the name and source of a subclass of the experiment with the best settings.

    Args:
      experiment: Full name of the experiment class.
      topology: Topology of the search.
      settings: Values of --set, including the best candidate's values.
      best: The best candidate and its plan.
    """
    module, _, base = experiment.rpartition(".")
    name = f"{base}Planned"
    candidate, plan = best
    setting_lines = "\n".join(f"    {setting!r}," for setting in settings)
    slices = f", {topology.num_slices} slices" if topology.num_slices > 1 else ""
    source = f'''"""The fastest layout of {experiment} on {topology.name}{slices}."""

from {module} import {base}
from praxis_lite import register
from praxis_lite.config.experiment_overrides import configured

SETTINGS = [
{setting_lines}
]


@register
class {name}({base}):
    """{candidate.name}: {seconds_text(seconds_or_infinity(plan))} per step (predicted).

    {plan.peak_bytes_per_device / 2**30:.2f} GiB per device.
    """

    def config(self):
        return configured({base}, SETTINGS, {{{module.partition(".")[0]!r}}})
'''
    return name, source
