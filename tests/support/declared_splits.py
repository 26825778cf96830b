"""What a job's Partitioner makes of declarations: the split of each weight, and some losses."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, MeshConfig
from praxis_lite.core import Learner, Partitioner, WeightSharding, make_mesh
from praxis_lite.tasks.loss import LossTask

DEVICES, ONE_DEVICE = (1, 4, 2), (1, 1, 1)


def no_loss(model: Any, inputs: Any, key: Any) -> float:
    """The loss of a job of which only the layout is asked."""
    return 0.0


def partitioner_of(
    model: Any,
    loss: Any = no_loss,
    mesh_shape: tuple[int, ...] = DEVICES,
    optimizer: Any = optax.adam,
    **declared: Any,
) -> Partitioner:
    """Returns a job's steps on a mesh of the axes replica, data and mdl.

    Args:
      declared: settings of WeightSharding.
    """
    weight_sharding = WeightSharding(**declared) if declared else None
    task = LossTask(
        model,
        loss,
        Learner(optimizer, 0.1),
        weight_sharding=weight_sharding,
        inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=mesh_shape)))


def splits_of(model: Any, **declared: Any) -> dict[str, tuple]:
    """Returns by path the mesh axes of each dim of a weight, once its slots are found to agree."""
    leaves = partitioner_of(model, **declared).layout.leaves()
    specs = {leaf.path: tuple(leaf.spec) for leaf in leaves}
    weights = {
        path.removeprefix("mdl_vars/params/"): spec
        for path, spec in specs.items()
        if path.startswith("mdl_vars/params/")
    }
    for path, spec in weights.items():
        slots = {own: s for own, s in specs.items() if own.endswith(f"/mu/{path}")}
        assert slots and set(slots.values()) == {spec}, (path, spec, slots)
    return weights


@contextlib.contextmanager
def refused(words: Sequence[str]) -> Iterator[None]:
    """Checks that the block raises a ConfigError whose message has all the words."""
    with pytest.raises(ConfigError) as error:
        yield
    message = str(error.value)
    assert all(word in message for word in words), message


class Layers(nnx.Module):
    """Layers side by side, each a case: one job decides on all."""

    def __init__(self, makes: Sequence[Callable[..., nnx.Module]], rngs: nnx.Rngs):
        for i, make in enumerate(makes):
            setattr(self, f"case_{i}", make(rngs=rngs))


class CasesOfRules:
    """Cases of layers, those of equal rules decided in one job.

    Args:
      found: `splits_of` or `stacks_of`.
      cases: by name what makes the layer of `rngs`, settings of WeightSharding, and more.
    """

    def __init__(self, found: Callable[..., dict[str, Any]], cases: Mapping[str, tuple]):
        self.found, self.cases = found, cases
        self.results: dict[str, dict[str, Any]] = {}

    def of(self, name: str) -> dict[str, Any]:
        """Returns a case's results by path."""
        rules = self.cases[name][1]
        same = [other for other, case in self.cases.items() if case[1] == rules]
        if repr(rules) not in self.results:
            build = functools.partial(Layers, [self.cases[other][0] for other in same])
            self.results[repr(rules)] = self.found(build, **rules)
        start, results = f"case_{same.index(name)}/", self.results[repr(rules)]
        return {p.removeprefix(start): x for p, x in results.items() if p.startswith(start)}


def stacks_of(model: Any, **declared: Any) -> dict[str, str]:
    """Returns by path how an optimizer sees a weight: "unstacked", or "stack_3" of three layers."""
    leaves = partitioner_of(model, **declared).layout.leaves()
    paths = [leaf.path.split("/") for leaf in leaves if "/mu/" in leaf.path]
    return {"/".join(path[path.index("mu") + 1 :]): path[2] for path in paths}


def losses_of(
    model: Any,
    loss: Any,
    batch: dict[str, np.ndarray],
    mesh_shape: tuple[int, ...] = DEVICES,
    num_steps: int = 2,
    **settings: Any,
) -> list[float]:
    """Returns the losses of a few steps; `settings` as of `partitioner_of`."""
    partitioner = partitioner_of(model, loss, mesh_shape, **settings)
    key = partitioner.key(0)
    state, losses = partitioner.init(key), []
    for _ in range(num_steps):
        state, outputs = partitioner.train_step(state, partitioner.global_batch(batch), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    return losses


@functools.cache
def batch_of(num_rows: int, dims: int) -> dict[str, np.ndarray]:
    """Returns rows of floats, and labels that they tell."""
    x = np.random.default_rng(3).normal(size=(num_rows, dims)).astype(np.float32)
    return {"x": x, "labels": np.argmax(x, axis=1).astype(np.int32)}


def xent(model: Any, inputs: Any, key: Any) -> jax.Array:
    """The loss of a classifier of such rows."""
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs["x"]), inputs["labels"])
