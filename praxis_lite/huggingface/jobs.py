"""Creates jobs from Hugging Face models, and exports jobs in Hugging Face format."""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import jax

from praxis_lite.checkpoints.init.packed_layouts import unpacked_arrays, unpacked_layout
from praxis_lite.core.errors import ConfigError, first_few, require, require_choice
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.places import check_upload, is_url
from praxis_lite.huggingface.adapters import merged_weights
from praxis_lite.huggingface.model import EXPERIMENT
from praxis_lite.huggingface.pretrained import (
    CAME_FROM,
    FromHuggingFace,
    Pretrained,
    write_description,
)
from praxis_lite.huggingface.tensors.tensor_files import TensorFiles, model_folder
from praxis_lite.job.job_dir import JobDir, open_for_reading
from praxis_lite.layers.whole_model.adapters import adapted_layers
from praxis_lite.trained_model.loading import load
from praxis_lite.trainer.create_job import create_job, new_job_dir

Note = Callable[[str], None]


def begin_job(
    directory: str | os.PathLike[str],
    job_log_dir: str | os.PathLike[str],
    *,
    settings: Sequence[str] = (),
    note: Note = lambda line: None,
) -> JobDir:
    """Creates a huggingface.CausalLm job whose checkpoint at step 0 contains a model's weights.

    config.json and the tokenizer are copied to the job directory, and the job's HF_DIR points to
    the copy, so the job does not need the model's directory afterwards.

    Args:
      directory: Directory of the model, or hf://org/name[@revision].
      job_log_dir: New or empty directory for the job.
      settings: Settings "path=value", as for --set.
      note: Called with progress messages while the weights are read.

    Returns:
      The directory of the job.

    Raises:
      ConfigError: See `Pretrained`, `new_job_dir` and `create_job`.
    """

    def initial_state(partitioner: Partitioner, job: Job) -> FromHuggingFace:
        return FromHuggingFace(directory, partitioner.layout)

    # Raise errors about the model before anything is written.
    TensorFiles(model_folder(directory))
    with new_job_dir(job_log_dir, EXPERIMENT) as job_dir:
        write_description(directory, job_dir.huggingface)
        settings = (hf_dir_setting(job_dir), *settings)
        return create_job(initial_state, EXPERIMENT, job_dir, settings, note=note)


def hf_dir_setting(job_dir: JobDir) -> str:
    """Returns the --set argument that points HF_DIR to the job's copy of the model's files."""
    return f"HF_DIR={job_dir.huggingface.absolute()}"


def export_job(
    job_log_dir: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapters: Literal["merge", "peft"] | None = None,
    note: Note = lambda line: None,
) -> None:
    """Exports a checkpoint of a job in Hugging Face format.

    Args:
      job_log_dir: Directory of a job that started from a Hugging Face model.
      directory: New or empty directory for the export, or hf://org/name[@branch] to upload it to
        the Hugging Face Hub. A new repository is private.
      step: Step of the checkpoint, or None for the latest.
      dtype: See `Pretrained.write`.
      adapters: How to export LoRA adapters: "merge" adds them to the weights, and "peft" writes
        only the adapters, in PEFT's format. Required if the model has adapters, otherwise it must
        be None.
      note: Called with progress messages.

    Raises:
      ConfigError: The job did not start from a Hugging Face model; the model has adapters, but
        `adapters` is None; the model has no adapters, but `adapters` is set; or the repository
        cannot be written.
    """
    if adapters is not None:
        require_choice("export: adapters", adapters, ("merge", "peft"))
    job_dir = open_for_reading(job_log_dir, writes=False)
    require(
        job_dir.huggingface.is_dir(),
        "export: the job",
        str(job_dir.location),
        "a job that started from a Hugging Face model (import, or run.init_from_huggingface)",
    )
    if is_url(directory):
        check_upload(directory)  # Before the weights are read.
    model = load(job_log_dir, step)
    stored_layout = model.partitioner.layout.select("mdl_vars")
    layout = unpacked_layout(stored_layout)
    mesh, task = model.partitioner.mesh, model.partitioner.task
    layers = adapted_layers(task.model.abstract_module())
    if layers and adapters is None:
        raise ConfigError(
            f"export: the job's model has adapters in {first_few(list(layers))}. Merge them into "
            "the weights with --adapters merge, or export only the adapters with --adapters peft."
        )
    if adapters is not None and not layers:
        raise ConfigError(
            f"export: --adapters {adapters} requires a model with adapters, but the job's model "
            "has none. Omit --adapters."
        )
    # Weights that the job stores in packed form are exported in the form that their layers declare.
    paths = [leaf.path for leaf in stored_layout.leaves()]
    arrays = dict(zip(paths, jax.tree.leaves(model.mdl_vars), strict=True))
    arrays = unpacked_arrays(stored_layout, arrays, mesh)
    pretrained = Pretrained(job_dir.huggingface, layout)
    if adapters == "peft":
        base_model = (job_dir.huggingface / CAME_FROM).read_text("utf-8").strip()
        pretrained.write_adapters(
            directory, arrays, layers, mesh, task, dtype, base_model=base_model, note=note
        )
    else:
        arrays = merged_weights(arrays, list(layout.leaves()), layers)
        pretrained.write(directory, arrays, mesh, task, dtype, note=note)
