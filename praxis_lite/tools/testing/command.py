"""The check of an experiment as it was launched: shrunk if asked, on the meshes that are named."""

from collections.abc import Callable, Sequence

from praxis_lite.run.experiment.launched_config import LaunchedConfig
from praxis_lite.run.trainer.job_on_mesh import use_compilation_cache
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.testing.certificate import Certificate
from praxis_lite.tools.testing.meshes import Shape, parse_meshes
from praxis_lite.tools.testing.on_meshes import check_on_meshes
from praxis_lite.tools.testing.shrink import shrunk


def check(
    launched: LaunchedConfig, *, meshes: str | Sequence[Shape] | None = None, steps: int = 20,
    shrink: bool = False, print_text: Callable[[str], None],
) -> Certificate:
    """Returns the comparisons as text, and the first difference.

    Args:
      meshes: "1x4x2,...", as for --meshes, or shapes; None: those of `check_on_meshes`.
      steps: of training on the experiment's own mesh.
      shrink: True: a smaller model of the same kind is checked.
      print_text: told what is being done, a line each.
    """
    config, not_certified = launched.config, []
    if shrink:
        config, not_certified = shrunk(config)
        print_text(f"Shrunk; these sizes are not certified: {', '.join(not_certified)}.")
    if isinstance(meshes, str):
        meshes = parse_meshes(meshes, tuple(config.mesh.axis_names))
    use_compilation_cache()
    # What a mesh reshards at a cost is said in training: here meshes are tried that nobody chose.
    with explained_warnings(lambda warning: None):
        certificate = check_on_meshes(
            config, meshes, steps=steps, name=launched.experiment, packages=launched.packages,
            print_text=print_text,
        )
    certificate.not_certified = not_certified
    return certificate
