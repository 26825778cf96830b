"""The weights of a checkpoint of Pax as the initial state of a job."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.tools.pax.weights import mdl_vars_from_pax


class FromPax:
    """The initial state that a checkpoint of Pax gives: all weights, those in `new` drawn.

    Args:
      variables: as `read_pax_checkpoint` returns them.
      ignore, new: see `mdl_vars_from_pax`.
      seed: of what is new.
    """

    step = 0

    def __init__(
        self, variables: Mapping[str, Any], partitioner: Partitioner, *,
        ignore: Sequence[str] = (), new: Sequence[str] = (), seed: int = 0,
    ):
        self._variables, self._model = variables, partitioner.task.model
        self._layout = partitioner.layout.select("mdl_vars")
        self._settings = {"ignore": ignore, "new": new, "key": jax.random.key(seed)}
        self.paths = [f"mdl_vars/{leaf.path}" for leaf in self._layout.leaves()]

    def keep(self, files: JobDir) -> None:
        """Nothing of Pax is needed later on."""

    def read(self, mesh: Mesh, note: Callable[[str], None]) -> dict[str, jax.Array]:
        """Returns the weights.

        Raises:
          ConfigError: the variables do not fit the model.
        """
        mdl_vars = mdl_vars_from_pax(self._model, self._variables, **self._settings)
        place = jax.jit(self._layout.pad, out_shardings=self._layout.shardings(mesh))
        return dict(zip(self.paths, jax.tree.leaves(place(mdl_vars)), strict=True))
