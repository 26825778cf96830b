"""A small classifier for synthetic points."""

import fiddle as fdl
import numpy as np
import optax

from praxis_lite import Experiment, MeshConfig, RunConfig, register
from praxis_lite.core import Learner
from praxis_lite.inputs import InMemory
from praxis_lite.layers import Mlp
from praxis_lite.tasks.image_classification import ClassificationTask

__all__ = ["Spirals", "spirals"]


def spirals(num_examples: int, seed: int) -> dict[str, np.ndarray]:
    """Returns noisy points [n, 2] on three interleaved spirals, labeled by spiral."""
    rng = np.random.default_rng(seed)
    labels, radius = rng.integers(0, 3, num_examples), rng.uniform(0.1, 1.0, num_examples)
    angle = 5 * radius + labels * 2 * np.pi / 3 + rng.normal(scale=0.25, size=num_examples)
    return {
        "inputs": radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1),
        "labels": labels,
    }


@register
class Spirals(Experiment):
    """Trains an MLP with prime widths to classify points on three spirals; takes seconds."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def task(self):
        batch = ("replica", "data")
        mlp = fdl.Partial(
            Mlp,
            input_dims=2,
            hidden_dims=(67, 61),
            output_dims=3,
            weight_split_dims_mapping=(None, "mdl"),
            activation_split_dims_mapping=(batch, "mdl"),
        )
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adamw), learning_rate=1e-2)
        return fdl.Config(
            ClassificationTask,
            model=mlp,
            learner=learner,
            inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
        )

    def datasets(self):
        train, heldout = (fdl.Partial(spirals, n, seed) for n, seed in ((4000, 0), (501, 1)))
        return {
            "train": fdl.Config(InMemory, train, batch_size=100, shuffle=True),
            "heldout": fdl.Config(InMemory, heldout, batch_size=100, shuffle=False),
        }

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=200)
