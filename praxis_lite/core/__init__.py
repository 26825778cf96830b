"""The core framework: models, tasks, and a Partitioner that compiles a task's steps for any mesh.

This package requires only jax, flax, optax and numpy. It never imports the packages that are built
on it: layers, optimizers, data, experiments and checkpoints.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
