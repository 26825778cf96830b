"""The former name of a Partitioner with explicit collectives."""

import warnings
from collections.abc import Sequence

from jax.sharding import Mesh

from praxis_lite.collectives.explicit_collectives import ExplicitCollectives
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh_config import CompilerOptions
from praxis_lite.core.task import Task


class ShardMapPartitioner(Partitioner):
    """`Partitioner(task, mesh, gradients=ExplicitCollectives(data_axes))`, which replaces it."""

    def __init__(
        self, task: Task, mesh: Mesh, *, data_axes: Sequence[str] = ("data",),
        compiler_options: CompilerOptions | None = None,
    ):
        warnings.warn(
            "ShardMapPartitioner(task, mesh, data_axes=...) is Partitioner(task, mesh, "
            "gradients=ExplicitCollectives(data_axes)) of praxis_lite.collectives now, and goes "
            "with the next minor version.", DeprecationWarning, stacklevel=2,
        )
        super().__init__(
            task, mesh, gradients=ExplicitCollectives(data_axes), compiler_options=compiler_options
        )
