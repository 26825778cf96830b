"""A job that begins with a model of Hugging Face, and a job's model as one of Hugging Face."""

import os
from collections.abc import Callable, Mapping, Sequence

import jax

from praxis_lite.checkpoints.huggingface.pretrained import ADAPTERS, Pretrained
from praxis_lite.errors import ConfigError, few, require
from praxis_lite.experiment.experiment import Job
from praxis_lite.interop.begin_job import begin_job_with
from praxis_lite.interop.huggingface.model import EXPERIMENT
from praxis_lite.interop.trained_model import load
from praxis_lite.job.job_dir import JobDir, open_for_reading
from praxis_lite.partitioner import Partitioner

Note = Callable[[str], None]


def begin_job(
    directory: str | os.PathLike[str],
    job_log_dir: str | os.PathLike[str],
    *,
    settings: Sequence[str] = (),
    note: Note = lambda line: None,
) -> JobDir:
    """Returns a new job of huggingface.CausalLm whose checkpoint of step 0 has a model's weights.

    Args:
      directory: of the model.
      job_log_dir: a new or an empty directory.
      settings: "path=value", as for --set.
      note: told how far the reading is.

    Raises:
      ConfigError: see `Pretrained` and `begin_job_with`.
    """
    found = []

    def weights(partitioner: Partitioner, job: Job) -> Mapping[str, jax.Array]:
        found.append(Pretrained(directory, partitioner.layout.select("mdl_vars")))
        return found[0].read(partitioner.mesh, note)

    job_dir = begin_job_with(
        weights, EXPERIMENT, job_log_dir, (f"HF_DIR={os.fspath(directory)}", *settings)
    )
    found[0].keep(job_dir.huggingface)
    return job_dir


def export_job(
    job_log_dir: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    note: Note = lambda line: None,
) -> None:
    """Writes the model of a job, of one of its checkpoints, as Hugging Face keeps it.

    Args:
      job_log_dir: of a job that began with a model of Hugging Face.
      directory: a new or an empty one.
      step: of the checkpoint; None: the newest.
      dtype, note: see `Pretrained.write`.

    Raises:
      ConfigError: the job did not begin so, or its model has adapters.
    """
    job_dir = open_for_reading(job_log_dir, writes=False)
    require(
        job_dir.huggingface.is_dir(), "export: the job", str(job_dir.path),
        "one that began with a model of Hugging Face (import, or run.init_from_huggingface)",
    )
    model = load(job_log_dir, step)
    layout = model.partitioner.layout.select("mdl_vars")
    paths = [leaf.path for leaf in layout.leaves()]
    adapters = [path for path in paths if path.rpartition("/")[2] in ADAPTERS]
    if adapters:
        raise ConfigError(
            f"export: the job's model has the adapters {few(adapters)}, which are no weights of "
            "the model that it began with."
        )
    arrays = dict(zip(paths, jax.tree.leaves(model.mdl_vars), strict=True))
    pretrained = Pretrained(job_dir.huggingface, layout)
    pretrained.write(directory, arrays, model.partitioner.mesh, dtype, note=note)
