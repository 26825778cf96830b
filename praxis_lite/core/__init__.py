"""The framework: a model, its Task, and a Partitioner that computes it on any mesh.

Needs jax, flax, optax and numpy alone. What is added to it lies beside this package, and it never
imports any of that: layers, optimizers, data, experiments, checkpoints.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
