"""The weights of a model of Hugging Face as the initial state of a job of any experiment."""

import os
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import few
from praxis_lite.core.partitioner.train_state import StateLayout
from praxis_lite.run.checkpoints.init.initial_state import drawn
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.tools.huggingface.pretrained import Pretrained, keep_description


class FromHuggingFace:
    """The initial state of `run.init_from_huggingface`: all weights but those of adapters.

    Args:
      directory: of the model.
      layout: of the TrainState.

    Raises:
      ConfigError: as `Pretrained`.
    """

    step = 0

    def __init__(self, directory: str | os.PathLike[str], layout: StateLayout):
        self.directory, self.layout = directory, layout
        self._pretrained = Pretrained(directory, layout.select("mdl_vars"))
        self.paths = {f"mdl_vars/{path}" for path in self._pretrained.paths}

    def keep(self, files: JobDir) -> None:
        """Writes the model's config.json and tokenizer, with which the job can export it."""
        if jax.process_index() == 0:
            keep_description(self.directory, files.huggingface)

    def read(self, mesh: Mesh, note: Callable[[str], None]) -> dict[str, jax.Array]:
        """Returns the weights."""
        arrays = self._pretrained.read(mesh, note)
        arrays = {f"mdl_vars/{path}": x for path, x in arrays.items()}
        new = drawn(self.layout, arrays)
        note(f"{len(arrays)} weights from {self.directory}" + (f"; new: {few(new)}" if new else ""))
        return arrays
