"""Where two runs differ first: the axes that must be split, the layer, the leaf, the step."""

import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_tools.check.certificate import Comparison, FirstDifference, split_axes
from praxis_tools.check.check import Check
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, names_of
from praxis_tools.check.runs.states import nudged
from praxis_tools.explain.hlo_layers import GRADIENT_OF

OF_TRAINING = ("loss", "metrics", "gradients", "learner", "weights", "slots", "averages",
               "variables", "counts", "padding", "initial state")
# Errors of a model, or of XLA, on a mesh that it does not support.
REFUSALS = (ConfigError, jax.errors.JaxRuntimeError, TypeError, ValueError, NotImplementedError)
# Scopes of the partitioner outside of the layers.
_NO_LAYERS = ("inputs", "unpad", "pad")


def first_difference(
    check: Check, runner: TaskRunner | None, failed: Sequence[Comparison]
) -> FirstDifference:
    """Returns where the first of the failed comparisons has its cause.

    Args:
      runner: on the mesh on which they failed; None: no mesh was in use.
      failed: in the order in which they were made.
    """
    first = failed[0]
    axis, layer = None, ""
    is_of_training = first.what in OF_TRAINING and runner is not None
    if runner is not None and split_axes(runner.mesh.shape) and first.mesh != "one device":
        axes = list(split_axes(runner.mesh.shape))
        if is_of_training and len(axes) > 1:
            axes = _fewest_axes(check, runner, first, axes)
        axis = "+".join(axes)
    if is_of_training and first.what != "initial state" and first.step is not None:
        layer = _first_layer(check, runner, first.step)
    same = [x for x in failed if x.what == first.what and x.step == first.step]
    here = [x for x in same if layer and f"{layer}/" in f"{x.leaf}/"]
    leaf = max(here or same, key=lambda item: item.share)
    if not layer:
        layer = layer_of(leaf.leaf, names_of(check.one_device.layout.shapes.mdl_vars["params"]))
    return FirstDifference(
        leaf.what, layer, leaf.leaf, leaf.step, axis, leaf.mesh, leaf.difference, leaf.tolerance
    )


def layer_of(leaf: str, weights: Iterable[str]) -> str:
    """Returns the layer that a leaf of a report or a state belongs to; "" without a layer.

    A weight without a layer around it is its own.

    Args:
      weights: the paths of all weights. The path of a gradient, a slot or an average ends in that
        of its weight.
    """
    name = max((x for x in weights if f"/{leaf}".endswith(f"/{x}")), key=len, default="")
    if not name and leaf.startswith("mdl_vars/non_trainable/"):
        name = leaf.removeprefix("mdl_vars/non_trainable/")
    return name.rpartition("/")[0] or name


def _fewest_axes(
    check: Check, runner: TaskRunner, first: Comparison, axes: Sequence[str]
) -> list[str]:
    """Returns the fewest axes that differ too if the mesh splits these alone."""
    for number in range(1, len(axes)):
        for some in itertools.combinations(axes, number):
            shape = tuple(
                size if axis in some else 1 for axis, size in runner.mesh.shape.items()
            )
            try:
                item = check.on_mesh(shape)
                result = (
                    check.compare_initial(item) if first.what == "initial state"
                    else check.compare_training(item, (first.step or 0) + 1)
                )
            except REFUSALS:
                continue
            if any(not x.is_equal and x.what == first.what for x in result):
                return list(some)
    return list(axes)


def _first_layer(check: Check, runner: TaskRunner, step: int) -> str:
    """Returns the layer whose values differ first in a training step, or "" if none does."""
    reference, state = check.reference_of(runner), check.state
    if step:
        _, state, _ = reference.train(state, check.batches[:step], check.seed)
    try:
        expected, moved, actual = (
            item.by_layer(given, check.batches[step], check.seed)
            for item, given in ((reference, state), (reference, nudged(state)), (runner, state))
        )
    except REFUSALS as error:
        check.remark(f"The program's layers were not compared: {str(error).splitlines()[0]}")
        return ""
    # What is differentiated by hand is a device's share of the loss, with gradients of other sizes.
    by_hand = runner.partitioner.gradients.num_parts is not None
    layer = first_of_layers(expected, moved, actual, (GRADIENT_OF,) if by_hand else ())
    return "" if layer.startswith("learner") else layer


def first_of_layers(
    expected: Leaves, moved: Leaves, actual: Leaves, skipped: Sequence[str] = ()
) -> str:
    """Returns the first layer in the program whose values differ, or "" if none do.

    Args:
      expected, actual: of two runs, as `in_float64(by_layer=True)` records them.
      moved: as `expected`, of weights that are moved by rounding.
      skipped: layers whose names begin so are passed over.
    """
    there: dict[str, list[np.ndarray]] = {}
    for key, x in actual.items():
        there.setdefault(layer_of_key(key), []).append(x)
    for key in sorted(expected):
        layer, x = layer_of_key(key), expected[key]
        if not layer or layer.startswith((*_NO_LAYERS, *skipped)):
            continue
        moved_by = np.max(np.abs(moved[key] - x), initial=0.0)
        atol = 1e-9 * max(np.max(np.abs(x), initial=0.0), 1e-3) + 1000.0 * moved_by
        candidates = [element for element in there.get(layer, []) if element.shape == x.shape]
        if candidates and not any(np.max(np.abs(one - x)) <= atol for one in candidates):
            return layer.removeprefix(GRADIENT_OF)
    return ""


def layer_of_key(key: str) -> str:
    """Returns the layer of a key of `in_float64(by_layer=True)`."""
    return key.split("|", 1)[1]
