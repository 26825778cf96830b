"""`main.py --mode=check`: the certificate as a table, a line, a file and an exit status."""

import argparse
import json
import sys

import fiddle as fdl

from praxis_lite.core.errors import require
from praxis_lite.run.experiment.registry import allowed_packages
from praxis_lite.run.options import file_path
from praxis_lite.run.trainer.job_on_mesh import use_compilation_cache
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.testing.certificate import Certificate
from praxis_lite.tools.testing.meshes import parse_meshes
from praxis_lite.tools.testing.on_meshes import check_on_meshes
from praxis_lite.tools.testing.shrink import shrunk


def check(args: argparse.Namespace, config: "fdl.Config", experiment: str) -> None:
    """Prints what was compared; exits 1 if anything differs."""
    path = args.json and file_path(args, "--json", "certificate.json")
    steps = 20 if args.steps is None else args.steps
    require(steps > 0, "--steps", steps, "1 or more")
    not_certified = []
    if args.shrink:
        config, not_certified = shrunk(config)
        print(f"Shrunk; these sizes are not certified: {', '.join(not_certified)}.", flush=True)
    meshes = None
    if args.meshes is not None:
        meshes = parse_meshes(args.meshes, tuple(config.mesh.axis_names))
    use_compilation_cache()
    # What a mesh reshards at a cost is said in training: here meshes are tried that nobody chose.
    with explained_warnings(lambda warning: None):
        certificate = check_on_meshes(
            config, meshes, steps=steps, name=experiment,
            packages=allowed_packages(args.packages),
            print_text=lambda text: print(text, flush=True),
        )
    certificate.not_certified = not_certified
    if path:
        path.write_text(json.dumps(certificate.to_json(), indent=1) + "\n", "utf-8")
    _print(certificate)
    if not certificate.certified:
        sys.exit(1)


def _print(certificate: Certificate) -> None:
    print(f"\n{certificate.table()}\n\n{certificate.summary()}", flush=True)
