"""A Partitioner whose gradients are summed by explicit collectives."""

from praxis_lite.core import Partitioner
from praxis_lite.core.collectives import ExplicitCollectives


def explicit_partitioner(task, mesh, data_axes=("data",), **settings):
    return Partitioner(task, mesh, gradients=ExplicitCollectives(data_axes), **settings)
