"""Checks an experiment by training it on one device and on each mesh."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import jax

from praxis_lite.config.build import build
from praxis_lite.config.overrides import check_required
from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, is_positive_int, require, require_choice
from praxis_lite.core.sharding.mesh import attached_devices, filled_mesh, simulate_devices
from praxis_lite.experiment.experiment import Experiment
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.trainer.checks.job_checks import check_parts
from praxis_lite.trainer.compilation import use_compilation_cache
from praxis_tools.check.bisect import MODEL_ERRORS, first_difference
from praxis_tools.check.certificate import Certificate, mesh_name
from praxis_tools.check.check import Check, CheckFailed
from praxis_tools.check.meshes import (
    NUM_DEVICES,
    Shape,
    choose_meshes,
    reduced_shape,
)
from praxis_tools.check.parts import data, own_mesh
from praxis_tools.check.runs.on_mesh import structs
from praxis_tools.check.shrink import shrink_config
from praxis_tools.explain.compiler_warnings import explained_warnings

# The parts of a check, in order.
PARTS = ("data", "initial weights", *own_mesh.PARTS)
NUM_STEPS_ON_OTHER_MESHES = 3


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
    """Compares an experiment on meshes with the same experiment on a single device.

    Args:
      experiment: An Experiment, an Experiment class, or the config of a job.
      meshes: Shapes of meshes with the job's axes, such as [(1, 4, 2), (2, 2, 2)]. Defaults to the
        experiment's own mesh, meshes that split one axis, a mesh that splits all axes, and the mesh
        with the most uneven splits.
      steps: Number of training steps on the experiment's own mesh, or on the last of `meshes`. At
        most three steps are trained on other meshes.
      parts: Names of the parts to run, from `PARTS`, such as ("training", "evaluation"), or None
        for all parts.
      print_text: Function called with a line of text for each part of the check.
      name: Name of the experiment in the certificate. Defaults to the name of the experiment's
        class.
      packages: Packages whose functions and classes the config may reference, in addition to the
        library and the experiment's package.

    Returns:
      The certificate, with all comparisons and the first difference.

    Raises:
      ConfigError: The experiment cannot be trained, or its own mesh cannot be checked.
    """
    if isinstance(experiment, type):
        experiment = experiment()
    if isinstance(experiment, Experiment):
        cls = type(experiment)
        name = name or function_name(cls)
        packages = (*packages, cls.__module__.partition(".")[0])
        experiment = experiment.config()
    require(is_positive_int(steps), "steps", steps, "a whole number, 1 or more")
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
    launched: LaunchedConfig,
    *,
    meshes: Sequence[Shape] | None,
    steps: int,
    shrink: bool,
    print_text: Callable[[str], None],
) -> Certificate:
    """Runs `check_on_meshes` for an experiment with settings from the command line.

    Args:
      launched: The experiment and its settings.
      meshes: Shapes of meshes, or None for the default of `check_on_meshes`.
      steps: Number of training steps on the experiment's own mesh.
      shrink: Whether to check a smaller model of the same architecture instead.
      print_text: Function called with a line of text for each part of the check.
    """
    config = launched.config
    not_certified: list[str] = []
    if shrink:
        config, not_certified = shrink_config(config)
        print_text(f"Sizes reduced by --shrink, not certified: {', '.join(not_certified)}.")
    use_compilation_cache()
    # Ignore warnings about costly resharding: the user did not choose these meshes.
    with explained_warnings(lambda warning: None):
        certificate = check_on_meshes(
            config,
            meshes,
            steps=steps,
            name=launched.experiment,
            packages=launched.packages,
            print_text=print_text,
        )
    certificate.not_certified = not_certified
    return certificate


def _run(check: Check, meshes: Sequence[Shape] | None) -> Certificate:
    """Runs a check until the first difference and returns its certificate."""
    num_devices, platform = attached_devices()
    check.print_progress(f"{num_devices} {platform} devices, jax {jax.__version__}")
    mesh = filled_mesh(check.job.mesh, num_devices)
    reduced = reduced_shape(mesh, num_devices)
    if reduced != mesh.shape:
        check.add_note(
            f"The experiment's mesh {mesh.shape} needs more than {num_devices} devices; "
            f"{reduced} is checked instead."
        )
    shapes = meshes or choose_meshes(reduced, check.one_device.layout, num_devices)
    try:
        if check.includes("data"):
            check.print_progress("data, read twice")
            check.add(None, data.compare_repeated(check.job))
        check.prepare(reduced if reduced in shapes else shapes[-1])
        for shape in shapes:
            _check_mesh(check, shape)
        if check.own_shape in check.meshes:
            own_mesh.check_parts(check, check.meshes[check.own_shape])
    except CheckFailed as error:
        check.print_progress(f"{error.failed[0].kind} differs; locating the cause")
        check.certificate.first_difference = first_difference(check, error.runner, error.failed)
    return check.certificate


def _check_mesh(check: Check, shape: Shape) -> None:
    name = mesh_name(dict(zip(check.job.mesh.axis_names, shape, strict=True)))
    check.print_progress(f"mesh {name}")
    comparisons, is_own = [], shape == check.own_shape
    try:
        runner = check.on_mesh(shape)
        runner.partitioner.train_step.trace(structs(check.batches[0]))
        if check.includes("initial weights"):
            comparisons += check.compare_initial(runner)
        if check.includes("training"):
            comparisons += check.compare_training(runner, 1)
            if is_own:
                comparisons += check.compare_full_batch(runner)
    except MODEL_ERRORS as error:
        message = str(error.args[0]).splitlines()[0]
        if is_own:
            raise ConfigError(f"The mesh {name} cannot be checked. {message}") from error
        check.add_note(f"The mesh {name} is not checked. {message}")
        return
    check.certificate.meshes[name], check.meshes[shape] = dict(runner.mesh.shape), runner
    check.add(runner, comparisons)
    # A few steps are sufficient on other meshes, because the code is the same on all meshes.
    num_steps = check.num_steps if is_own else min(check.num_steps, NUM_STEPS_ON_OTHER_MESHES)
    if check.includes("training") and num_steps > 1:
        check.print_progress(f"mesh {name}: {num_steps} steps")
        check.add(runner, check.compare_training(runner, num_steps))
