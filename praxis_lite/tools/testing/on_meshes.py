"""The check as a function, for a test of your own."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.core.callables import callable_name
from praxis_lite.core.errors import is_whole, require, require_choice
from praxis_lite.core.sharding.mesh import simulate_devices
from praxis_lite.run.config.build import build
from praxis_lite.run.config.overrides import check_required
from praxis_lite.run.experiment.experiment import Experiment
from praxis_lite.run.trainer.checks.job_checks import check_parts
from praxis_lite.tools.testing.certificate import Certificate
from praxis_lite.tools.testing.check import Check
from praxis_lite.tools.testing.course import PARTS, run
from praxis_lite.tools.testing.meshes import NUM_DEVICES, Shape


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
      parts: of `PARTS`, such as ("training", "evaluation"), which alone are made; None: all.
      print_text: told what is being done, a line each.
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
        name = name or callable_name(kind)
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
    return run(check, meshes)
