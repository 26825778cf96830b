"""Returns the weight shardings that a Partitioner chooses, and the losses of a few steps."""

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
    """A constant loss, for tests that only need the layout."""
    return 0.0


def partitioner_of(
    model: Any,
    loss: Any = no_loss,
    mesh_shape: tuple[int, ...] = DEVICES,
    optimizer: Any = optax.adam,
    **declared: Any,
) -> Partitioner:
    """Returns a Partitioner for a model on a mesh with the axes replica, data and mdl.

    Args:
      model: The model.
      loss: The loss function.
      mesh_shape: Shape of the mesh.
      optimizer: The optimizer.
      declared: Settings of WeightSharding.
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
    """Returns the mesh axes of each dim of each weight, and checks that its slots have the same."""
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
    """Checks that the block raises a ConfigError whose message contains all the words."""
    with pytest.raises(ConfigError) as error:
        yield
    message = str(error.value)
    assert all(word in message for word in words), message


class Layers(nnx.Module):
    """A module with an independent layer per case, so that one Partitioner handles all cases."""

    def __init__(self, makes: Sequence[Callable[..., nnx.Module]], rngs: nnx.Rngs):
        for i, make in enumerate(makes):
            setattr(self, f"case_{i}", make(rngs=rngs))


class CasesOfRules:
    """Test cases that each consist of a layer and sharding rules.

    Cases with the same rules share a Partitioner.

    Args:
      found: `splits_of` or `stacks_of`.
      cases: Maps names to (function of `rngs` that creates a layer, WeightSharding settings, ...).
    """

    def __init__(self, found: Callable[..., dict[str, Any]], cases: Mapping[str, tuple]):
        self.found, self.cases = found, cases
        self.results: dict[str, dict[str, Any]] = {}

    def of(self, name: str) -> dict[str, Any]:
        """Returns the results of a case by path."""
        rules = self.cases[name][1]
        same = [other for other, case in self.cases.items() if case[1] == rules]
        if repr(rules) not in self.results:
            build = functools.partial(Layers, [self.cases[other][0] for other in same])
            self.results[repr(rules)] = self.found(build, **rules)
        start, results = f"case_{same.index(name)}/", self.results[repr(rules)]
        return {p.removeprefix(start): x for p, x in results.items() if p.startswith(start)}


def stacks_of(model: Any, **declared: Any) -> dict[str, str]:
    """Returns how the optimizer gets each weight, by path.

    "unstacked" means one array per layer; "stack_3" means a stack of three layers.
    """
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
    """Returns the losses of a few steps. For `settings`, see `partitioner_of`."""
    partitioner = partitioner_of(model, loss, mesh_shape, **settings)
    key = partitioner.key(0)
    state, losses = partitioner.init(key), []
    for _ in range(num_steps):
        state, outputs = partitioner.train_step(state, partitioner.global_batch(batch), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    return losses


@functools.cache
def batch_of(num_rows: int, dims: int) -> dict[str, np.ndarray]:
    """Returns random rows, and labels that are the indices of their largest elements."""
    x = np.random.default_rng(3).normal(size=(num_rows, dims)).astype(np.float32)
    return {"x": x, "labels": np.argmax(x, axis=1).astype(np.int32)}


def xent(model: Any, inputs: Any, key: Any) -> jax.Array:
    """Returns the cross-entropy of a classifier for the batches of `batch_of`."""
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs["x"]), inputs["labels"])
