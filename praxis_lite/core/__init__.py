"""The framework: a model, its Task, and a Partitioner that compiles its steps for any mesh.

This package needs only jax, flax, optax and numpy. It never imports the packages built on it:
layers, optimizers, data, experiments, checkpoints.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
