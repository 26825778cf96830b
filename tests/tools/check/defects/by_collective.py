"""Each collective of a user's own program: dropped, doubled, of another kind, on another axis."""

import jax
import jax.numpy as jnp

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, replaced

WHERE = "tests.tools.check.collectives"


def _in_place(name, new):
    """Returns a planter of `new(old, x, axis, ...)` for a collective; `along`: the array's dim."""

    def made(old):
        def call(x, mesh_axis, *args, axis=None, **named):
            if axis is None:
                return new(old, x, mesh_axis, *args, **named)
            gather = lambda x, mesh_axis, along: old(x, mesh_axis, axis=along)  # noqa: E731
            return new(gather, x, mesh_axis, along=axis)

        return call

    return replaced(f"{WHERE}:{name}", made)


def _dropped_gather(old, x, axis, along):
    # Each device takes its own block for those of all.
    return jnp.concatenate([x] * jax.lax.axis_size(axis), along)


def _dropped_scatter(old, x, axis, *, scatter_dimension):
    size = jax.lax.axis_size(axis)
    part = x.shape[scatter_dimension] // size
    start = jax.lax.axis_index(axis) * part
    return jax.lax.dynamic_slice_in_dim(x, start, part, axis=scatter_dimension)


def _swapped_all_to_all(old, x, axis, *, split_axis, concat_axis):
    # Blocks of rows where blocks of features are wanted: the exchange does not happen.
    size = jax.lax.axis_size(axis)
    blocks = jnp.split(x, size, split_axis)
    return jnp.concatenate([blocks[0]] * size, concat_axis)


OTHER = {"mdl": "data", "data": "mdl"}


def _of_axis(old, x, axis, *args, **named):
    return old(x, OTHER[axis], *args, **named)


def _rolled(old, x, axis, pairs):
    return old(x, axis, [(a, (b + 1) % len(pairs)) for a, b in pairs])


CHANGES = {
    "psum": {
        "dropped": lambda old, x, axis: x,
        "doubled": lambda old, x, axis: old(old(x, axis), axis),
        "a mean": lambda old, x, axis: jax.lax.pmean(x, axis),
        "a maximum": lambda old, x, axis: jax.lax.pmax(jax.lax.stop_gradient(x), axis),
        "on the other axis": _of_axis,
        "on both axes": lambda old, x, axis: old(x, ("data", "mdl")),
    },
    "pmean": {
        "dropped": lambda old, x, axis: x,
        "a sum": lambda old, x, axis: jax.lax.psum(x, axis),
        "on the other axis": _of_axis,
        "a maximum": lambda old, x, axis: jax.lax.pmax(jax.lax.stop_gradient(x), axis),
    },
    "pmax": {
        "dropped": lambda old, x, axis: x,
        "on the other axis": _of_axis,
    },
    "all_gather": {
        "dropped": _dropped_gather,
        "on the other axis": lambda old, x, axis, **named: old(x, OTHER[axis], **named),
        "in another order": lambda old, x, axis, along: jnp.roll(
            old(x, axis, along), x.shape[along], along
        ),
        "without a gradient": lambda old, x, axis, along: (
            old(x, axis, along)
            if jax.lax.axis_size(axis) == 1
            else jax.lax.stop_gradient(old(x, axis, along))
        ),
    },
    "psum_scatter": {
        "dropped": _dropped_scatter,
        "a mean": lambda old, x, axis, **named: old(x, axis, **named) / jax.lax.axis_size(axis),
        "on the other axis": lambda old, x, axis, **named: old(x, OTHER[axis], **named),
        "doubled": lambda old, x, axis, **named: old(jax.lax.psum(x, axis), axis, **named),
        "scattered to the wrong device": lambda old, x, axis, **named: jax.lax.ppermute(
            old(x, axis, **named),
            axis,
            [(0, 1), (1, 0)] if jax.lax.axis_size(axis) > 1 else [(0, 0)],
        ),
    },
    "ppermute": {
        "dropped": lambda old, x, axis, pairs: x,
        "to the wrong device": _rolled,
        "on the other axis": lambda old, x, axis, pairs: old(
            x,
            OTHER[axis],
            [
                (i, (i + 1) % jax.lax.axis_size(OTHER[axis]))
                for i in range(jax.lax.axis_size(OTHER[axis]))
            ],
        ),
        "one-sided": lambda old, x, axis, pairs: old(x, axis, pairs[:-1] or pairs),
    },
    "all_to_all": {
        "dropped": _swapped_all_to_all,
        "on the other axis": lambda old, x, axis, **named: old(x, OTHER[axis], **named),
        "with blocks exchanged": lambda old, x, axis, **named: jax.lax.ppermute(
            old(x, axis, **named),
            axis,
            [(0, 1), (1, 0)] if jax.lax.axis_size(axis) > 1 else [(0, 0)],
        ),
    },
}


def _index(new):
    return replaced(f"{WHERE}:axis_index", lambda old: lambda axis: new(old, axis))


INDICES = {
    "the same everywhere": lambda old, axis: old(axis) * 0,
    "of the other axis": lambda old, axis: old(OTHER[axis]) % jax.lax.axis_size(axis),
    "off by one": lambda old, axis: (old(axis) + 1) % jax.lax.axis_size(axis),
}
DEFECTS = [
    Defect(
        f"{name} {how}",
        tiny.Collectives,
        _in_place(name, change),
        (2, 2),
    )
    for name, changes in CHANGES.items()
    for how, change in changes.items()
] + [
    Defect(f"axis_index {how}", tiny.Collectives, _index(change), (2, 2))
    for how, change in INDICES.items()
]
