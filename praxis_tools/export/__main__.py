"""Exports a job's decode step or its model's forward pass as StableHLO, to run with only jax.

python -m praxis_tools.export JOB OUT --what=decode|predict [--mesh=1,2,2]
    [--batch=ROWS|b] [--length=TOKENS] [--platforms=cpu,cuda] [--step N] [--set path=value ...]
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from praxis_lite.host.optional_packages import require_package
from praxis_lite.job.command import Parser, run
from praxis_lite.modes.evaluate import add_step

if TYPE_CHECKING:
    from praxis_lite.core.partitioner.partitioner import Partitioner
    from praxis_lite.inputs.base import InputPipeline


def main(argv: Sequence[str] | None = None) -> None:
    """Writes program.bin, weights.npz, manifest.json and the loader load.py to OUT."""
    run(lambda: _export(argv), continues_without_output=True)


def _export(argv: Sequence[str] | None) -> None:
    args = _parser().parse_args(argv)
    require_package("flatbuffers", "praxis_tools.export")
    # Import jax late, so that Ctrl-C during its import prints no traceback.
    from praxis_lite.core.errors import format_bytes
    from praxis_lite.host.whole_files import new_directory
    from praxis_lite.job.local_directory import local_directory
    from praxis_tools.export.artifact import MANIFEST, write_artifact
    from praxis_tools.export.inputs import inputs_of
    from praxis_tools.export.program import exported_program

    out = local_directory(args.out)
    with new_directory(out, MANIFEST) as target:
        partitioner, weights, datasets, about = _load_model(args)
        inputs = inputs_of(
            partitioner.task,
            args.what,
            datasets,
            given=args.inputs,
            batch=args.batch,
            length=args.length,
        )
        platforms = [name for name in args.platforms.split(",") if name]
        program = exported_program(partitioner, args.what, inputs, platforms)
        about = {"what": args.what, "job": args.job, **about, **_text_settings(partitioner.task)}
        if args.what == "decode":
            # Donate the weights, because nothing else uses them.
            weights = partitioner.for_decoding(weights, donates=True)
        sizes = write_artifact(target, program, partitioner, weights, about)
    files = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    print(f"wrote {out}: {files}")


class _Model(NamedTuple):
    """A trained model to export.

    Attributes:
      partitioner: Partitioner of the model's task.
      mdl_vars: Model weights.
      datasets: Maps the names of datasets to pipelines, whose batches determine the input shapes.
      about: Metadata for the manifest.
    """

    partitioner: "Partitioner"
    mdl_vars: Any
    datasets: "Mapping[str, InputPipeline]"
    about: dict[str, Any]


def _load_model(args: Any) -> _Model:
    from praxis_lite.host.hub import is_hub_url
    from praxis_lite.job.local_directory import local_directory

    # Hugging Face directories contain safetensors files; job directories never do.
    if is_hub_url(args.job) or any(local_directory(args.job).glob("*.safetensors")):
        return _load_from_huggingface(args)
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
    return _Model(model.partitioner, model.mdl_vars_with(use_ema=use_ema), datasets, about)


def _load_from_huggingface(args: Any) -> _Model:
    from praxis_lite.core.errors import ConfigError, require
    from praxis_lite.core.sharding.mesh import make_mesh, simulate_devices
    from praxis_lite.core.sharding.mesh_config import MeshConfig
    from praxis_lite.huggingface.model import EXPERIMENT, load

    if args.step is not None:
        raise ConfigError(
            "--step cannot be combined with a Hugging Face directory, which has no checkpoint "
            "steps. Remove --step."
        )
    sizes = (args.mesh or "1,1,1").split(",")
    is_valid = len(sizes) == 3 and all(size.isdecimal() and int(size) for size in sizes)
    require(is_valid, "--mesh", args.mesh, "sizes of the axes replica, data and mdl, such as 1,2,2")
    config = MeshConfig(ici_mesh_shape=tuple(map(int, sizes)), allow_unused_devices=True)
    simulate_devices(config.num_devices)
    model = load(
        args.job,
        make_mesh(config),
        settings=args.settings,
        note=_log.info,
    )
    about = {"experiment": EXPERIMENT, "step": None}
    return _Model(model.partitioner, model.mdl_vars, {}, about)


def _text_settings(task: Any) -> dict[str, Any]:
    """Returns JSON values that describe a task's tokenizer and decoder, for the manifest."""
    settings = {}
    if task.tokenizer is not None:
        tokenizer = task.tokenizer
        settings["tokenizer"] = {
            "class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "eos_ids": list(tokenizer.eos_ids),
            "padding": "zeros on the right",
        }
    if dataclasses.is_dataclass(task.decoder) and not isinstance(task.decoder, type):
        fields = dataclasses.asdict(task.decoder)
        settings["decoder"] = {"class": type(task.decoder).__name__, **fields}
    return settings


def _parser() -> Parser:
    parser = Parser(
        prog="python -m praxis_tools.export",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("job", metavar="JOB", help="job directory or Hugging Face model directory")
    add("out", metavar="OUT", help="directory to create")
    add(
        "--what",
        choices=("decode", "predict"),
        required=True,
        help="export the job's decode step, or the model's forward pass",
    )
    add_step(parser.add_argument_group("the job"))
    add("--mesh", metavar="SIZES", help="axis sizes, such as 1,2,2; default: the job's mesh")
    add(
        "--batch",
        metavar="ROWS",
        help="number of rows, or b for any multiple of the number of "
        "devices; default: as in the dataset",
    )
    add(
        "--length",
        type=int,
        metavar="TOKENS",
        help="number of tokens per row (maximum prompt length); default: as in the dataset",
    )
    add(
        "--inputs",
        nargs="+",
        default=[],
        metavar="NAME=DTYPE[ROWS,DIM,...]",
        help="shapes of all inputs; default: as in the dataset",
    )
    add(
        "--platforms",
        default="",
        metavar="NAME,...",
        help="cpu, cuda, rocm or tpu; default: the current platform",
    )
    add(
        "--set",
        dest="settings",
        metavar="path=value",
        nargs="+",
        action="extend",
        default=[],
        help="as in main.py",
    )
    add("--packages", metavar="NAME,...", default="", help="as in main.py")
    return parser


if __name__ == "__main__":
    main()


_log = logging.getLogger(__name__)
