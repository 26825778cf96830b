"""`main.py --mode=check`: the certificate as a table, a line and a file."""

import json
from pathlib import Path

from praxis_lite.run.experiment.launched_config import LaunchedConfig
from praxis_lite.run.trainer.job_on_mesh import use_compilation_cache
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.testing.meshes import parse_meshes
from praxis_lite.tools.testing.on_meshes import check_on_meshes
from praxis_lite.tools.testing.shrink import shrunk


def check(
    launched: LaunchedConfig, *, meshes: str | None = None, steps: int = 20, shrink: bool = False,
    file: Path | None = None,
) -> bool:
    """Returns True if nothing differs; prints what was compared.

    Args:
      meshes: "1x4x2,...", as for --meshes; None: those of `check_on_meshes`.
      steps: of training on the experiment's own mesh.
      shrink: True: a smaller model of the same kind is checked.
      file: to write the certificate into.
    """
    config, not_certified = launched.config, []
    if shrink:
        config, not_certified = shrunk(config)
        print(f"Shrunk; these sizes are not certified: {', '.join(not_certified)}.", flush=True)
    shapes = None if meshes is None else parse_meshes(meshes, tuple(config.mesh.axis_names))
    use_compilation_cache()
    # What a mesh reshards at a cost is said in training: here meshes are tried that nobody chose.
    with explained_warnings(lambda warning: None):
        certificate = check_on_meshes(
            config, shapes, steps=steps, name=launched.experiment, packages=launched.packages,
            print_text=lambda text: print(text, flush=True),
        )
    certificate.not_certified = not_certified
    if file is not None:
        file.write_text(json.dumps(certificate.to_json(), indent=1) + "\n", "utf-8")
    print(f"\n{certificate.table()}\n\n{certificate.summary()}", flush=True)
    return certificate.certified
