"""`praxis export`: exports a job's decode step or its model's forward pass as StableHLO."""

import argparse
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from praxis_lite.core.errors import ConfigError, format_bytes, require
from praxis_lite.host.optional_packages import require_package
from praxis_lite.modes.evaluate import add_step
from praxis_lite.modes.job_from_command import job_log_dir
from praxis_lite.modes.mode import CommandLine, Mode
from praxis_lite.modes.options import names

if TYPE_CHECKING:
    from praxis_lite.core.partitioner.partitioner import Partitioner
    from praxis_lite.inputs.base import InputPipeline


class Export(Mode):
    """Writes program.bin, weights.npz, manifest.json and the loader load.py to a directory."""

    name = "export"
    summary = "exports a decode step or a forward pass as StableHLO, to run with only jax"
    argument = "job_log_dir"
    continues_without_output = True

    def add_options(self, options: argparse._ArgumentGroup) -> None:
        """Adds the output directory, and the options for the program and its inputs."""
        add = options.add_argument
        add("out", metavar="OUT", help="directory to create")
        add(
            "--what",
            choices=("decode", "predict"),
            required=True,
            help="export the job's decode step, or the model's forward pass",
        )
        add_step(options)
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
            type=names,
            default=[],
            metavar="NAME,...",
            help="cpu, cuda, rocm or tpu; default: the current platform",
        )

    def run(
        self,
        command: CommandLine,
        *,
        out: str,
        what: Literal["decode", "predict"],
        step: int | Literal["best"] | None,
        mesh: str | None,
        batch: str | None,
        length: int | None,
        inputs: Sequence[str],
        platforms: Sequence[str],
    ) -> None:
        """Exports the program; raises ConfigError if the model does not have the step."""
        require_package("flatbuffers", "praxis export")
        from praxis_lite.host.hub import is_hub_url
        from praxis_lite.job.local_directory import directory, output_directory
        from praxis_tools.export.artifact import MANIFEST, write_artifact
        from praxis_tools.export.inputs import inputs_of
        from praxis_tools.export.program import exported_program

        job = job_log_dir(command)
        with output_directory(out, MANIFEST) as target:
            # Hugging Face directories contain safetensors files; job directories never do.
            if is_hub_url(job) or any(directory(job).glob("*.safetensors")):
                if step is not None:
                    raise ConfigError(
                        "--step cannot be combined with a Hugging Face directory, which has no "
                        "checkpoint steps. Remove --step."
                    )
                model = _load_from_huggingface(job, mesh, command.settings)
            else:
                model = _load_job(job, command, what, step, mesh)
            partitioner, weights = model.partitioner, model.mdl_vars
            shapes = inputs_of(
                partitioner.task, what, model.datasets, given=inputs, batch=batch, length=length
            )
            program = exported_program(partitioner, what, shapes, platforms)
            about = {"what": what, "job": job, **model.about, **_text_settings(partitioner.task)}
            if what == "decode":
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


def _load_job(
    job: str,
    command: CommandLine,
    what: str,
    step: int | Literal["best"] | None,
    mesh: str | None,
) -> _Model:
    from praxis_lite.trained_model.loading import load

    settings = [*command.settings, *([] if mesh is None else [f"mesh.ici_mesh_shape={mesh}"])]
    model = load(job, step, mesh="job", settings=settings, packages=command.packages)
    run, decodes = model.job.run, what == "decode"
    use_ema = run.decode_use_ema_states if decodes else run.evaluation.use_ema_states
    datasets = model.job.decode_datasets if decodes else model.job.datasets
    about = {"experiment": model.experiment, "step": model.step}
    return _Model(model.partitioner, model.mdl_vars_with(use_ema=use_ema), datasets, about)


def _load_from_huggingface(directory: str, mesh: str | None, settings: Sequence[str]) -> _Model:
    from praxis_lite.core.sharding.mesh import make_mesh, simulate_devices
    from praxis_lite.core.sharding.mesh_config import MeshConfig
    from praxis_lite.huggingface.model import EXPERIMENT, load

    sizes = (mesh or "1,1,1").split(",")
    is_valid = len(sizes) == 3 and all(size.isdecimal() and int(size) for size in sizes)
    require(is_valid, "--mesh", mesh, "sizes of the axes replica, data and mdl, such as 1,2,2")
    config = MeshConfig(ici_mesh_shape=tuple(map(int, sizes)), allow_unused_devices=True)
    simulate_devices(config.num_devices)
    model = load(
        directory,
        make_mesh(config),
        settings=settings,
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


_log = logging.getLogger(__name__)
