"""A job that begins with a model of Hugging Face, and a job's model exported for it."""

import os
from collections.abc import Callable, Sequence

import jax

from praxis_lite.core.errors import ConfigError, few, require, require_choice
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.files.json_text import content_of
from praxis_lite.layers.whole_model.adapters import adapted_layers
from praxis_lite.run.checkpoints.init.kept_arrays import whole_arrays, whole_layout
from praxis_lite.run.experiment.experiment import Job
from praxis_lite.run.job.job_dir import JobDir, open_for_reading
from praxis_lite.run.job.local_directory import local_directory
from praxis_lite.run.loading import load
from praxis_lite.tools.foreign_checkpoints.begin_job import begin_job_with, beginning
from praxis_lite.tools.huggingface.adapters import merged_weights
from praxis_lite.tools.huggingface.initial_state import FromHuggingFace
from praxis_lite.tools.huggingface.model import EXPERIMENT
from praxis_lite.tools.huggingface.pretrained import CAME_FROM, Pretrained, keep_description
from praxis_lite.tools.huggingface.tensors.tensor_files import TensorFiles

Note = Callable[[str], None]
ADAPTERS = ("merge", "peft")


def begin_job(
    directory: str | os.PathLike[str], job_log_dir: str | os.PathLike[str], *,
    settings: Sequence[str] = (), note: Note = lambda line: None,
) -> JobDir:
    """Returns a new job of huggingface.CausalLm whose checkpoint of step 0 has a model's weights.

    The job needs the model's directory no longer: its HF_DIR is what it keeps of it itself.

    Args:
      directory: of the model.
      job_log_dir: a new or an empty directory.
      settings: "path=value", as for --set.
      note: told how far the reading is.

    Raises:
      ConfigError: see `Pretrained`, `beginning` and `begin_job_with`.
    """
    def source(partitioner: Partitioner, job: Job) -> FromHuggingFace:
        return FromHuggingFace(directory, partitioner.layout)

    TensorFiles(local_directory(directory))  # Looked at before anything is made.
    with beginning(job_log_dir, EXPERIMENT) as job_dir:
        keep_description(directory, job_dir.huggingface)
        given = (hf_dir_setting(job_dir), *settings)
        return begin_job_with(source, EXPERIMENT, job_dir, given, note=note)


def hf_dir_setting(job_dir: JobDir) -> str:
    """Returns the value of HF_DIR in a job of `begin_job`, for --set."""
    return f"HF_DIR={job_dir.huggingface.absolute()}"


def export_job(
    job_log_dir: str | os.PathLike[str], directory: str | os.PathLike[str], *,
    step: int | None = None, dtype: str | None = None, adapters: str | None = None,
    note: Note = lambda line: None,
) -> None:
    """Exports a checkpoint of a job in the format of Hugging Face.

    Args:
      job_log_dir: of a job that began with a model of Hugging Face.
      directory: a new or an empty one.
      step: of the checkpoint; None: the newest.
      dtype, note: see `Pretrained.write`.
      adapters: of a model that has some: "merge", they are folded into its weights; "peft", they
        alone are written, for PEFT and what reads its files.

    Raises:
      ConfigError: the job did not begin so; its model has adapters and it is not said what of
        them, or the other way round.
    """
    if adapters is not None:
        require_choice("export: adapters", adapters, ADAPTERS)
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
            f"export: the job's model has adapters in {few(list(layers))}, which are no weights of "
            "the model that it began with. Fold them into it with --adapters merge, or write them "
            "alone with --adapters peft."
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
        came_from = content_of(job_dir.huggingface / CAME_FROM).decode("utf-8", "replace").strip()
        pretrained.write_adapters(
            directory, arrays, layers, mesh, task, dtype, base_model=came_from, note=note
        )
    else:
        arrays = merged_weights(arrays, list(layout.leaves()), layers)
        pretrained.write(directory, arrays, mesh, task, dtype, note=note)
