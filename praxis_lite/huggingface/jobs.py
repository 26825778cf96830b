"""Begins jobs with Hugging Face models, and exports jobs as Hugging Face models."""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import jax

from praxis_lite.checkpoints.init.kept_arrays import whole_arrays, whole_layout
from praxis_lite.core.errors import ConfigError, few, require, require_choice
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment.experiment import Job
from praxis_lite.huggingface.adapters import merged_weights
from praxis_lite.huggingface.model import EXPERIMENT
from praxis_lite.huggingface.pretrained import (
    CAME_FROM,
    FromHuggingFace,
    Pretrained,
    write_description,
)
from praxis_lite.huggingface.tensors.tensor_files import TensorFiles
from praxis_lite.job.job_dir import JobDir, open_for_reading
from praxis_lite.job.local_directory import local_directory
from praxis_lite.layers.whole_model.adapters import adapted_layers
from praxis_lite.trained_model.loading import load
from praxis_lite.trainer.begin_job import begin_job_with, new_job_dir

Note = Callable[[str], None]


def begin_job(
    directory: str | os.PathLike[str], job_log_dir: str | os.PathLike[str], *,
    settings: Sequence[str] = (), note: Note = lambda line: None,
) -> JobDir:
    """Returns a new job of huggingface.CausalLm whose checkpoint of step 0 has a model's weights.

    The job no longer needs the model's directory: its HF_DIR is a folder of the job.

    Args:
      directory: of the model.
      job_log_dir: new or empty.
      settings: "path=value", as for --set.
      note: called with the progress of the reading.

    Raises:
      ConfigError: see `Pretrained`, `new_job_dir` and `begin_job_with`.
    """
    def source(partitioner: Partitioner, job: Job) -> FromHuggingFace:
        return FromHuggingFace(directory, partitioner.layout)

    TensorFiles(local_directory(directory))  # Fails before anything is written.
    with new_job_dir(job_log_dir, EXPERIMENT) as job_dir:
        write_description(directory, job_dir.huggingface)
        given = (hf_dir_setting(job_dir), *settings)
        return begin_job_with(source, EXPERIMENT, job_dir, given, note=note)


def hf_dir_setting(job_dir: JobDir) -> str:
    """Returns the value of HF_DIR in a job of `begin_job`, for --set."""
    return f"HF_DIR={job_dir.huggingface.absolute()}"


def export_job(
    job_log_dir: str | os.PathLike[str], directory: str | os.PathLike[str], *,
    step: int | None = None, dtype: str | None = None,
    adapters: Literal["merge", "peft"] | None = None, note: Note = lambda line: None,
) -> None:
    """Exports a checkpoint of a job in the format of Hugging Face.

    Args:
      job_log_dir: of a job that began with a model of Hugging Face.
      directory: new or empty.
      step: of the checkpoint; None: the newest.
      dtype, note: see `Pretrained.write`.
      adapters: for a model with adapters: "merge" adds them to its weights; "peft" writes them
        alone, in PEFT's format.

    Raises:
      ConfigError: the job did not begin with a Hugging Face model, or the model has adapters but
        `adapters` is None, or the other way round.
    """
    if adapters is not None:
        require_choice("export: adapters", adapters, ("merge", "peft"))
    job_dir = open_for_reading(job_log_dir, writes=False)
    require(
        job_dir.huggingface.is_dir(), "export: the job", str(job_dir.path),
        "one that began with a model of Hugging Face (import, or run.init_from_huggingface)",
    )
    model = load(job_log_dir, step)
    kept = model.partitioner.layout.select("mdl_vars")
    layout, mesh, task = whole_layout(kept), model.partitioner.mesh, model.partitioner.task
    layers = adapted_layers(task.model.abstract_module())
    if layers and adapters is None:
        raise ConfigError(
            f"export: the job's model has adapters in {few(list(layers))}. Merge them into its "
            "weights with --adapters merge, or write them alone with --adapters peft."
        )
    require(
        bool(layers) or adapters is None, "export: the adapters of the job's model", "none",
        f"some, for --adapters {adapters}", "Leave --adapters out.",
    )
    paths = [leaf.path for leaf in kept.leaves()]
    arrays = dict(zip(paths, jax.tree.leaves(model.mdl_vars), strict=True))
    arrays = whole_arrays(kept, arrays, mesh)
    pretrained = Pretrained(job_dir.huggingface, layout)
    if adapters == "peft":
        came_from = (job_dir.huggingface / CAME_FROM).read_text("utf-8").strip()
        pretrained.write_adapters(
            directory, arrays, layers, mesh, task, dtype, base_model=came_from, note=note
        )
    else:
        arrays = merged_weights(arrays, list(layout.leaves()), layers)
        pretrained.write(directory, arrays, mesh, task, dtype, note=note)
