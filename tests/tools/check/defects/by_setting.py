"""Settings of models of others that only change how something is computed, and change a number."""

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, num_devices, replaced, with_gradient_times

HIDDEN = "tests.tools.check.tiny:hidden_of"
SWITCHED = ("settings switched",)


def _hidden(change):
    """Returns a planter of `change(hidden, x, w, remat, unroll)`."""

    def new(old):
        return lambda x, w, remat, unroll: change(old(x, w, remat, unroll), x, w, remat, unroll)

    return replaced(HIDDEN, new)


def _if_remat(change):
    return _hidden(lambda h, x, w, remat, unroll: change(h, x, w) if remat else h)


def _if_unrolled(change):
    return _hidden(lambda h, x, w, remat, unroll: change(h, x, w) if unroll != 1 else h)


def _with_gradient_of(h, y):
    return h + y - jax.lax.stop_gradient(y)


def _last_row_left_out(h, x, w):
    return h.at[-1].set(h[0])


OF_REMAT = {
    "a gradient a tenth larger": lambda h, x, w: with_gradient_times(h, 1.1),
    "another gradient of the first layer": lambda h, x, w: _with_gradient_of(h, 0.3 * x @ w[0]),
    "one row for another": _last_row_left_out,
    "on a mesh alone": lambda h, x, w: h * (1.001 if num_devices() > 1 else 1.0),
}
DEFECTS = [
    Defect(f"remat of {name}: {what}", experiment, _if_remat(change), (2, 2), SWITCHED)
    for name, experiment in (("NNX", tiny.OfNnx), ("functions", tiny.OfFunctions))
    for what, change in OF_REMAT.items()
    if name == "NNX" or what in ("a gradient a tenth larger", "one row for another")
]
DEFECTS += [
    Defect(
        "unroll of NNX: a layer twice",
        tiny.OfNnx,
        _if_unrolled(lambda h, x, w: jnp.tanh(h @ w[-1])),
        (2, 2),
        SWITCHED,
    ),
    Defect(
        "unroll of functions: a gradient a tenth larger",
        tiny.OfFunctions,
        _if_unrolled(OF_REMAT["a gradient a tenth larger"]),
        (2, 2),
        SWITCHED,
    ),
    Defect(
        "scan_layers of Linen: only one layer",
        tiny.OfLinen,
        _hidden(lambda h, x, w, remat, unroll: jnp.tanh(x @ w[0])),
        (2, 2),
        SWITCHED,
    ),
    Defect(
        "scan_layers of Linen: in evaluation alone, on a mesh",
        tiny.OfLinen,
        _hidden(lambda h, x, w, remat, unroll: h * (1 + 1e-6 * (num_devices() > 1))),
        (2, 2),
        SWITCHED,
    ),
    Defect(
        "attention_impl of NNX: another number",
        tiny.OfNnx,
        replaced(
            "tests.tools.check.tiny:_projected",
            lambda old: lambda x, impl: x * (1.0 if impl == "fast" else 1.01),
        ),
        (2, 2),
        SWITCHED,
    ),
]
