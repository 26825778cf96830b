"""Saved and restored: leaves exchanged, a batch too far; data that is not the same again."""

import dataclasses
import functools
import itertools

import jax
import numpy as np

from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, replaced

RESUMED, DATA = ("resumed",), ("data",)
RESTORE = "praxis_lite.checkpoints.checkpoints:Checkpoints.restore"


def _state(change):
    def made(restored, *_):
        return dataclasses.replace(restored, state=change(restored.state))

    return after(RESTORE, made)


def _opt_states(change):
    return _state(lambda s: dataclasses.replace(s, opt_states=change(s.opt_states)))


def _zeros(x):
    return x * 0


def _rolled(tree):
    leaves, treedef = jax.tree.flatten(tree)
    by_shape = {}
    for place, x in enumerate(leaves):
        by_shape.setdefault((x.shape, x.dtype, str(x.sharding)), []).append(place)
    for places in by_shape.values():
        rolled = [leaves[place] for place in places[1:] + places[:1]]
        for place, x in zip(places, rolled, strict=True):
            leaves[place] = x
    return jax.tree.unflatten(treedef, leaves)


POSITION = "praxis_lite.inputs.position:DataPosition.of_step"


def _position(change):
    def new(old):
        return classmethod(lambda cls, step, skipped=(): cls(change(step), skipped))

    return replaced(POSITION, new)


DEFECTS = [
    Defect(f"resumed: {what}", tiny.Collectives, planted, (2, 2), RESUMED)
    for what, planted in {
        "slots restored into other leaves": _opt_states(
            lambda o: {**o, "slots": _rolled(o["slots"])}
        ),
        "slots are made anew": _opt_states(
            lambda o: {**o, "slots": jax.tree.map(_zeros, o["slots"])}
        ),
        "averages are made anew": _opt_states(
            lambda o: {**o, "ema": jax.tree.map(_zeros, o["ema"])}
        ),
        "the count of updates is lost": _opt_states(
            lambda o: {**o, "num_updates": o["num_updates"] * 0}
        ),
        "the step is one more": _state(lambda s: dataclasses.replace(s, step=s.step + 1)),
        "weights restored into other leaves": _state(
            lambda s: dataclasses.replace(s, mdl_vars=_rolled(s.mdl_vars))
        ),
        "weights lose a bit": _state(
            lambda s: dataclasses.replace(
                s, mdl_vars=jax.tree.map(lambda x: x * (1 + 2.0**-23), s.mdl_vars)
            )
        ),
        "a batch too far": _position(lambda step: step + bool(step)),
        "a batch again": _position(lambda step: max(step - 1, 0)),
        "the first batch again": _position(lambda step: 0),
    }.items()
]
BLOCK = "praxis_lite.checkpoints.sharded_reading:_read"


def _elsewhere(array, stored, leaf, mesh):
    # Wrong on another mesh than the one that saved alone.
    if mesh.size > 1 or array.ndim < 2:
        return array
    return jax.device_put(np.flip(np.asarray(array), 0), array.sharding)


DEFECTS.append(
    Defect(
        "restored on another mesh in another order",
        tiny.Points,
        after(BLOCK, _elsewhere),
        (2, 2),
        RESUMED,
    )
)

ROWS = "praxis_lite.inputs.numpy_data:InMemory.rows"
COUNT = itertools.count()


def _noisy(batch, *_):
    return {**batch, "inputs": batch["inputs"] + np.float32(1e-3) * next(COUNT)}


def _of_slice(batch, self, index, rows):
    return {k: x if rows.start == 0 else np.roll(x, 1, axis=0) for k, x in batch.items()}


def _batches(change):
    def new(old):
        @functools.wraps(old)
        def batches(self, start=0, *, rows=None):
            return change(old, self, start, rows)

        return batches

    target = "praxis_lite.inputs.base:IndexedPipeline.batches"
    return replaced(target, new)


DEFECTS += [
    Defect(f"data: {what}", tiny.Points, planted, (2, 2), DATA)
    for what, planted in {
        "another noise each time": after(ROWS, _noisy),
        "another process's rows are in another order": after(ROWS, _of_slice),
        "a later start is a batch too far": _batches(
            lambda old, self, start, rows: old(self, start + bool(start), rows=rows)
        ),
        "a later start begins again": _batches(
            lambda old, self, start, rows: old(self, 0, rows=rows)
        ),
        "every process gets the first rows": _batches(
            lambda old, self, start, rows: old(
                self, start, rows=rows and slice(0, rows.stop - rows.start)
            )
        ),
        "rows in an order of their own": after(
            ROWS,
            lambda batch, *_: {k: np.random.default_rng().permutation(x) for k, x in batch.items()},
        ),
    }.items()
]
