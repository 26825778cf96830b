"""The check of an experiment: a single device, then each mesh, then all other parts of a job."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax

from praxis_lite.config.build import build
from praxis_lite.config.overrides import check_required
from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, is_whole, require, require_choice
from praxis_lite.core.sharding.mesh import attached_devices, filled_mesh, simulate_devices
from praxis_lite.experiment.experiment import Experiment
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.trainer.checks.job_checks import check_parts
from praxis_lite.trainer.compilation import use_compilation_cache
from praxis_tools.check.bisect import REFUSALS, first_difference
from praxis_tools.check.certificate import Certificate, mesh_name
from praxis_tools.check.check import Check, CheckFailed
from praxis_tools.check.meshes import (
    NUM_DEVICES,
    Shape,
    chosen_meshes,
    parse_meshes,
    reduced,
)
from praxis_tools.check.parts import data, own_mesh
from praxis_tools.check.runs.on_mesh import structs
from praxis_tools.check.shrink import shrunk
from praxis_tools.explain.compiler_warnings import explained_warnings

# The parts of a check, in order.
PARTS = ("data", "initial weights", *own_mesh.PARTS)
FEW_STEPS = 3


def check_on_meshes(
    experiment: "Experiment | type[Experiment] | fdl.Config[Any]",
    meshes: Sequence[Shape] | None = None,
    *,
    steps: int = 20,
    parts: Sequence[str] | None = None,
    print_text: Callable[[str], None] = lambda text: None,
    name: str = "",
    packages: Sequence[str] = (),
) -> Certificate:
    """Returns the comparisons of a single device with meshes, and the first difference.

    Args:
      experiment: an Experiment, its class, or the config of its job.
      meshes: shapes of the job's axes, such as [(1, 4, 2), (2, 2, 2)]; None: its own, each axis
        alone, all axes, and one that divides as little as possible.
      steps: of training on its own mesh, or the last of those given; three on the others.
      parts: of `PARTS`, such as ("training", "evaluation"), to run only these; None: all.
      print_text: called with a line of text for each part of the work.
      name: of the experiment in the certificate; "": its class's.
      packages: whose functions and classes the config may name, besides the library's; a class
        given adds its own.

    Raises:
      ConfigError: the experiment is refused as in training, or a mesh does not fit.
    """
    if isinstance(experiment, type):
        experiment = experiment()
    if isinstance(experiment, Experiment):
        kind = type(experiment)
        name = name or function_name(kind)
        packages = (*packages, kind.__module__.partition(".")[0])
        experiment = experiment.config()
    require(is_whole(steps), "steps", steps, "a whole number, 1 or more")
    for part in parts or ():
        require_choice("A part of a check", part, PARTS)
    config = copy.deepcopy(experiment)
    check_required(config)
    check_parts(build(config))
    simulate_devices(NUM_DEVICES)
    check = Check(
        config, name, num_steps=steps, parts=parts, packages=packages, print_text=print_text
    )
    return _run(check, meshes)


def check_launched(
    launched: LaunchedConfig, *, meshes: str | Sequence[Shape] | None = None, steps: int = 20,
    shrink: bool = False, print_text: Callable[[str], None],
) -> Certificate:
    """Returns `check_on_meshes` of an experiment as it was launched.

    Args:
      meshes: "1x4x2,...", as for --meshes, or shapes; None: those of `check_on_meshes`.
      steps: of training on the experiment's own mesh.
      shrink: True: a smaller model of the same kind is checked.
      print_text: called with a line of text for each part of the work.
    """
    config, not_certified = launched.config, []
    if shrink:
        config, not_certified = shrunk(config)
        print_text(f"Shrunk; these sizes are not certified: {', '.join(not_certified)}.")
    if isinstance(meshes, str):
        meshes = parse_meshes(meshes, tuple(config.mesh.axis_names))
    use_compilation_cache()
    # Resharding that costs time is reported in training: here meshes are tried that nobody chose.
    with explained_warnings(lambda warning: None):
        certificate = check_on_meshes(
            config, meshes, steps=steps, name=launched.experiment, packages=launched.packages,
            print_text=print_text,
        )
    certificate.not_certified = not_certified
    return certificate


def _run(check: Check, meshes: Sequence[Shape] | None) -> Certificate:
    """Returns the certificate; it ends at the first mesh or property that differs."""
    num_devices, platform = attached_devices()
    check.note(f"{num_devices} {platform} devices, jax {jax.__version__}")
    mesh = filled_mesh(check.job.mesh, num_devices)
    smaller = reduced(mesh, num_devices)
    if smaller != mesh.shape:
        check.remark(
            f"The experiment's mesh {mesh.shape} is larger than the {num_devices} "
            f"devices; it is checked as {smaller}."
        )
    shapes = meshes or chosen_meshes(smaller, check.one_device.layout, num_devices)
    try:
        if check.includes("data"):
            check.note("the data, twice")
            check.add(None, data.repeatable(check.job))
        check.prepare(smaller if smaller in shapes else shapes[-1])
        for shape in shapes:
            _check_mesh(check, shape)
        if check.own_shape in check.meshes:
            own_mesh.check_parts(check, check.meshes[check.own_shape])
    except CheckFailed as error:
        check.note(f"{error.failed[0].what} differs; looking for where")
        check.certificate.first_difference = first_difference(check, error.runner, error.failed)
    return check.certificate


def _check_mesh(check: Check, shape: Shape) -> None:
    name = mesh_name(dict(zip(check.job.mesh.axis_names, shape, strict=True)))
    check.note(f"mesh {name}")
    first, is_own = [], shape == check.own_shape
    try:
        runner = check.on_mesh(shape)
        runner.partitioner.train_step.trace(structs(check.batches[0]))
        if check.includes("initial weights"):
            first += check.compare_initial(runner)
        if check.includes("training"):
            first += check.compare_training(runner, 1)
            if is_own:
                first += check.compare_whole_batch(runner)
    except REFUSALS as error:
        message = str(error.args[0]).splitlines()[0]
        if is_own:
            raise ConfigError(f"The mesh {name} cannot be checked. {message}") from error
        check.remark(f"The mesh {name} is left out. {message}")
        return
    check.certificate.meshes[name], check.meshes[shape] = dict(runner.mesh.shape), runner
    check.add(runner, first)
    # On the other meshes a few steps show what there is to see.
    longest = check.num_steps if is_own else min(check.num_steps, FEW_STEPS)
    if check.includes("training") and longest > 1:
        check.note(f"mesh {name}: {longest} steps")
        check.add(runner, check.compare_training(runner, longest))
