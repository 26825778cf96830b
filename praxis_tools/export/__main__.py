"""Exports a job's decoding step or its model's call as StableHLO and weights, to run with jax only.

    python -m praxis_tools.export JOB OUT --what=decode|predict [--mesh=1,2,2]
        [--batch=ROWS|b] [--length=TOKENS] [--platforms=cpu,cuda] [--step N] [--set path=value ...]
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from praxis_lite.host.optional_packages import require_package
from praxis_lite.job.command import Parser, run
from praxis_lite.job.processes.standard_output import print_log
from praxis_lite.modes.evaluate import add_step

if TYPE_CHECKING:
    from praxis_lite.core.partitioner.partitioner import Partitioner
    from praxis_lite.inputs.base import InputPipeline


def main(argv: Sequence[str] | None = None) -> None:
    """Writes OUT/program.bin, weights.npz, manifest.json, and load.py, which runs them."""
    run(lambda: _export(argv), goes_on=True)


def _export(argv: Sequence[str] | None) -> None:
    print_log()
    args = _parser().parse_args(argv)
    require_package("flatbuffers", "praxis_tools.export")
    # Imported here, so that a signal during the import of jax prints no traceback.
    from praxis_lite.core.errors import format_bytes
    from praxis_lite.host.whole_files import new_directory
    from praxis_lite.job.local_directory import local_directory
    from praxis_tools.export.artifact import MANIFEST, write_artifact
    from praxis_tools.export.inputs import inputs_of
    from praxis_tools.export.program import exported_program

    out = local_directory(args.out)
    with new_directory(out, MANIFEST) as target:
        partitioner, weights, datasets, about = _source(args)
        inputs = inputs_of(
            partitioner.task, args.what, datasets, given=args.inputs, batch=args.batch,
            length=args.length,
        )
        platforms = [name for name in args.platforms.split(",") if name]
        program = exported_program(partitioner, args.what, inputs, platforms)
        about = {
            "what": args.what, "job": args.job, **about, **_text_settings(partitioner.task)
        }
        if args.what == "decode":
            # Donated: nothing else is computed with them.
            weights = partitioner.for_decoding(weights, donates=True)
        sizes = write_artifact(target, program, partitioner, weights, about)
    files = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    print(f"wrote {out}: {files}")


class _Source(NamedTuple):
    """A trained model to export.

    Attributes:
      mdl_vars: its weights.
      about: facts for the manifest.
    """

    partitioner: "Partitioner"
    mdl_vars: Any
    datasets: "Mapping[str, InputPipeline]"
    about: dict[str, Any]


def _source(args: Any) -> _Source:
    from praxis_lite.job.local_directory import local_directory

    # The folder of a job has no safetensors.
    if any(local_directory(args.job).glob("*.safetensors")):
        return _from_huggingface(args)
    from praxis_lite.trained_model.loading import load

    mesh = [] if args.mesh is None else [f"mesh.ici_mesh_shape={args.mesh}"]
    packages = [name for name in args.packages.split(",") if name]
    model = load(
        args.job, args.step, mesh="job", settings=[*args.settings, *mesh], packages=packages
    )
    run, decodes = model.job.run, args.what == "decode"
    use_ema = run.decode_use_ema_states if decodes else run.evaluation.use_ema_states
    datasets = model.job.decode_datasets if decodes else model.job.datasets
    about = {"experiment": model.experiment, "step": model.step}
    return _Source(model.partitioner, model.mdl_vars_with(use_ema=use_ema), datasets, about)


def _from_huggingface(args: Any) -> _Source:
    from praxis_lite.core.errors import require
    from praxis_lite.core.sharding.mesh import make_mesh, simulate_devices
    from praxis_lite.core.sharding.mesh_config import MeshConfig
    from praxis_lite.huggingface.model import EXPERIMENT, load

    require(args.step is None, "--step", args.step, "left out: the directory has no steps")
    sizes = (args.mesh or "1,1,1").split(",")
    is_right = len(sizes) == 3 and all(size.isdecimal() and int(size) for size in sizes)
    require(is_right, "--mesh", args.mesh, "three sizes, of replica, data and mdl: 1,2,2")
    config = MeshConfig(ici_mesh_shape=tuple(map(int, sizes)), allow_unused_devices=True)
    simulate_devices(config.num_devices)
    model = load(
        args.job, make_mesh(config), settings=args.settings,
        note=lambda line: print(line, flush=True),
    )
    about = {"experiment": EXPERIMENT, "step": None}
    return _Source(model.partitioner, model.mdl_vars, {}, about)


def _text_settings(task: Any) -> dict[str, Any]:
    """Returns a task's tokenizer and decoder as JSON for the manifest."""
    result = {}
    if task.tokenizer is not None:
        tokenizer = task.tokenizer
        result["tokenizer"] = {
            "class": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size,
            "eos_ids": list(tokenizer.eos_ids), "padding": "zeros on the right",
        }
    if dataclasses.is_dataclass(task.decoder):
        fields = dataclasses.asdict(task.decoder)
        result["decoder"] = {"class": type(task.decoder).__name__, **fields}
    return result


def _parser() -> Parser:
    parser = Parser(
        prog="python -m praxis_tools.export", description=__doc__.partition("\n")[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("job", metavar="JOB", help="directory of a job, or of a model of Hugging Face")
    add("out", metavar="OUT", help="a new directory")
    add("--what", choices=("decode", "predict"), required=True,
        help="the job's decoding step, or the model's own call")
    add_step(parser.add_argument_group("the job"))
    add("--mesh", metavar="SIZES", help="of its axes, as 1,2,2; default: the job's own")
    add("--batch", metavar="ROWS", help="of a call, or b: any multiple of the devices; default: "
        "the dataset's")
    add("--length", type=int, metavar="TOKENS",
        help="of a row of ids: the longest prompt; default: the dataset's")
    add("--inputs", nargs="+", default=[], metavar="NAME=DTYPE[ROWS,DIM,...]",
        help="all inputs, in place of the dataset's")
    add("--platforms", default="", metavar="NAME,...", help="cpu, cuda, rocm, tpu; default: this")
    add("--set", dest="settings", metavar="path=value", nargs="+", action="extend", default=[],
        help="as of main.py")
    add("--packages", metavar="NAME,...", default="", help="as of main.py")
    return parser


if __name__ == "__main__":
    sys.exit(main())
