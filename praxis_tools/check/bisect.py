"""Locates the first difference between two runs.

The location consists of mesh axes, a layer, a leaf and a step.
"""

import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from praxis_lite.core.errors import ConfigError
from praxis_tools.check.certificate import Comparison, FirstDifference, split_axes
from praxis_tools.check.check import Check
from praxis_tools.check.runs.on_mesh import Leaves, TaskRunner, names_of
from praxis_tools.check.runs.states import nudge_state
from praxis_tools.explain.hlo_layers import GRADIENT_OF

OF_TRAINING = (
    "loss",
    "metrics",
    "gradients",
    "learner",
    "weights",
    "slots",
    "averages",
    "variables",
    "counts",
    "padding",
    "initial state",
)
# Errors that a model or XLA raises on an unsupported mesh.
MODEL_ERRORS = (
    ConfigError,
    jax.errors.JaxRuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
)
# Scopes of the partitioner that are not layers.
_PARTITIONER_SCOPES = ("inputs", "unpad", "pad")


def first_difference(
    check: Check, runner: TaskRunner | None, failed: Sequence[Comparison]
) -> FirstDifference:
    """Locates the cause of the first failed comparison.

    Args:
      check: The running check.
      runner: Runner on the mesh where comparisons failed, or None if no mesh was involved.
      failed: The failed comparisons, in the order in which they were made.
    """
    first = failed[0]
    axis, layer = None, ""
    is_of_training = first.kind in OF_TRAINING
    # Look for the smallest set of axes that reproduces the difference, and for the first layer.
    if runner is not None and split_axes(runner.mesh.shape) and first.mesh != "one device":
        axes = list(split_axes(runner.mesh.shape))
        if is_of_training and len(axes) > 1:
            axes = _fewest_axes(check, runner, first, axes)
        axis = "+".join(axes)
    can_record_layers = is_of_training and first.kind != "initial state"
    if runner is not None and can_record_layers and first.step is not None:
        layer = _first_layer(check, runner, first.step)
    # In this layer, or else among all comparisons of this kind, report the worst leaf.
    same_kind = [x for x in failed if x.kind == first.kind and x.step == first.step]
    in_layer = [x for x in same_kind if layer and f"{layer}/" in f"{x.leaf}/"]
    worst = max(in_layer or same_kind, key=lambda x: x.share)
    if not layer:
        layer = layer_of(worst.leaf, names_of(check.one_device.layout.shapes.mdl_vars["params"]))
    return FirstDifference(
        worst.kind,
        layer,
        worst.leaf,
        worst.step,
        axis,
        worst.mesh,
        worst.difference,
        worst.tolerance,
    )


def layer_of(leaf: str, weights: Iterable[str]) -> str:
    """Returns the layer to which a leaf in a report or a state belongs, or "" if there is none.

    If a weight is not in a layer, the name of the weight is returned.

    Args:
      leaf: Path of the leaf. The path of a gradient, a slot or a moving average ends with the path
        of its weight.
      weights: Paths of all weights.
    """
    name = max((x for x in weights if f"/{leaf}".endswith(f"/{x}")), key=len, default="")
    if not name and leaf.startswith("mdl_vars/non_trainable/"):
        name = leaf.removeprefix("mdl_vars/non_trainable/")
    return name.rpartition("/")[0] or name


def _fewest_axes(
    check: Check, runner: TaskRunner, first: Comparison, axes: Sequence[str]
) -> list[str]:
    """Returns the smallest set of mesh axes that reproduces a difference."""
    for num_axes in range(1, len(axes)):
        for subset in itertools.combinations(axes, num_axes):
            shape = tuple(size if axis in subset else 1 for axis, size in runner.mesh.shape.items())
            try:
                smaller = check.on_mesh(shape)
                comparisons = (
                    check.compare_initial(smaller)
                    if first.kind == "initial state"
                    else check.compare_training(smaller, (first.step or 0) + 1)
                )
            except MODEL_ERRORS:
                continue
            if any(not x.is_equal and x.kind == first.kind for x in comparisons):
                return list(subset)
    return list(axes)


def _first_layer(check: Check, runner: TaskRunner, step: int) -> str:
    """Returns the first layer whose values differ in a training step, or "" if no layer differs."""
    reference, state = check.reference_of(runner), check.state
    if step:
        _, state, _ = reference.train(state, check.batches[:step], check.seed)
    runs = ((reference, state), (reference, nudge_state(state)), (runner, state))
    try:
        expected, nudged, actual = (
            runner.by_layer(state, check.batches[step], check.seed) for runner, state in runs
        )
    except MODEL_ERRORS as error:
        check.add_note(f"Individual layers were not compared: {str(error).splitlines()[0]}")
        return ""
    # With manual collectives, each device differentiates its own share of the loss, so gradients
    # within layers are scaled differently.
    is_manual = runner.partitioner.gradient_functions.num_parts is not None
    layer = first_differing_layer(expected, nudged, actual, (GRADIENT_OF,) if is_manual else ())
    return "" if layer.startswith("learner") else layer


def first_differing_layer(
    expected: Leaves, nudged: Leaves, actual: Leaves, skipped: Sequence[str] = ()
) -> str:
    """Returns the first layer in a step whose values differ, or "" if no layer differs.

    Args:
      expected: Records of the expected run, from `in_float64(by_layer=True)`.
      nudged: Records of the same run with perturbed weights.
      actual: Records of the actual run, for instance on a mesh.
      skipped: Prefixes of layers to ignore.
    """
    actual_by_layer: dict[str, list[np.ndarray]] = {}
    for key, x in actual.items():
        actual_by_layer.setdefault(layer_of_key(key), []).append(x)
    for key in sorted(expected):
        layer, x = layer_of_key(key), expected[key]
        if not layer or layer.startswith((*_PARTITIONER_SCOPES, *skipped)):
            continue
        rounding = np.max(np.abs(nudged[key] - x), initial=0.0)
        atol = 1e-9 * max(np.max(np.abs(x), initial=0.0), 1e-3) + 1000.0 * rounding
        # On a mesh, more arrays may be recorded for a layer, in a different order. At least one of
        # these arrays must match.
        candidates = [y for y in actual_by_layer.get(layer, []) if y.shape == x.shape]
        if candidates and not any(np.max(np.abs(y - x)) <= atol for y in candidates):
            return layer.removeprefix(GRADIENT_OF)
    return ""


def layer_of_key(key: str) -> str:
    """Returns the layer named in a key of `LayerRecorder.records`."""
    return key.split("|", 1)[1]
