"""Stages of a pipeline: microbatches and gradients at the wrong stage or in another tick."""

import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp

from praxis_lite.core import MeshConfig, Partitioner
from praxis_lite.layers import OneForwardOneBackward, Pipeline, set_sharding_params
from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, replaced

PIPELINING = "praxis_lite.layers.stacking.pipelining"
SCHEDULE = f"{PIPELINING}.pipeline_schedules:Schedule"
INTERLEAVED = f"{PIPELINING}.pipeline_schedules:InterleavedSchedule"
TICKS = f"{PIPELINING}.interleaved_ticks"
MESH = (2, 1, 1)
BATCH = ("stage", "data")


class Split(tiny.Lm):
    """Three layers on two stages, four microbatches, the backward pass in two parts."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=MESH, axis_names=("stage", "data", "mdl"))

    def task(self):
        task = super().task()
        task.model.num_layers = 3
        task.model.stacked_transformer_tpl = fdl.Partial(
            Pipeline, num_stages=2, num_microbatches=4, split_backward=True
        )
        task.model = set_sharding_params(task.model, {"batch": ("data",)})
        task.inputs_split_mapping = {"map_1d": (BATCH,), "map_2d": (BATCH, None)}
        return task


class OneForward(Split):
    """The same by 1F1B."""

    def partitioner(self):
        return fdl.Partial(Partitioner, gradients=fdl.Config(OneForwardOneBackward))


class ThreeStages(OneForward):
    """The same on three stages: of two, each is next to the other both ways."""

    def task(self):
        task = super().task()
        task.model.stacked_transformer_tpl.num_stages = 3
        return task


class InOnePart(OneForward):
    """The same with a backward pass in one part: of two, no stage is idle in the second."""

    def task(self):
        task = super().task()
        task.model.stacked_transformer_tpl.split_backward = False
        return task


def _phases(change):
    """Returns a planter of other phases of 1F1B."""
    return replaced(
        f"{INTERLEAVED}.phases",
        lambda old: property(lambda self: change(self, old.fget(self))),
    )


def _carried(method, change):
    """Returns a planter of `change(new carry, ticks, old carry, t)` after a part of a tick."""
    return after(f"{TICKS}:InterleavedTicks.{method}", change)


def _a_wrong_way(x_S, by):
    return jnp.roll(x_S, -by, axis=0)


def _without_its_last(schedule, phases):
    ticks, *parts = phases[-1]
    return [*phases[:-1], (ticks[:-1], *parts)]


def _places(work, **changed):
    """Returns a result of a schedule with other microbatches, repeats or is_valid."""
    names = ("microbatch", "repeat", "is_valid")
    return tuple(
        changed[name](x) if name in changed else x for name, x in zip(names, work, strict=True)
    )


def _of_weight_one(reported, weight, *gradients):
    divisor = jnp.where(weight == 0, 1, weight)
    gradients = jax.tree.map(lambda g: g / divisor.astype(g.dtype), gradients)
    return reported, jnp.ones_like(weight), *gradients


def _of_other_rows(split, *_):
    def second(residuals, *again):
        rolled = [jnp.roll(a, i % 2, axis=0) if a.ndim else a for i, a in enumerate(residuals)]
        return split.second(rolled, *again)

    return dataclasses.replace(split, second=second)


def _rolled(function, grads):
    """Rolls the gradients that arrive at stages; other functions get their gradients unchanged."""
    is_leave = getattr(function, "func", function).__name__ == "leave"
    return (jnp.roll(grads[0], 1, 0), grads[1]) if is_leave else grads


IN_1F1B = {
    "the last tick is dropped": _phases(_without_its_last),
    "inputs that are kept are overwritten": replaced(
        f"{INTERLEAVED}.num_saved_inputs", lambda old: property(lambda self: 1)
    ),
    "a stage goes backward with the inputs of the tick before": after(
        f"{INTERLEAVED}.tick_forward", lambda tick, *_: tick - 1
    ),
    "a microbatch's weights' gradients are counted twice": _carried(
        "weights",
        lambda new, ticks, old, t: new._replace(
            grad_floats=jax.tree.map(
                lambda a, b: jnp.where(t == ticks.schedule.first_weights, 2 * b - a, b),
                old.grad_floats,
                new.grad_floats,
            )
        ),
    ),
    "weights' gradients are those of another microbatch": replaced(
        f"{TICKS}:InterleavedTicks.weights",
        lambda old: (
            lambda self, carry, t: old(
                self,
                carry._replace(residuals=[jnp.roll(kept, 1, axis=1) for kept in carry.residuals]),
                t,
            )
        ),
    ),
    "the embedding's gradients are left out": replaced(
        f"{PIPELINING}.split_model:SplitModel.enter_gradient",
        lambda old: lambda self, m, of_x: jax.tree.map(jnp.zeros_like, old(self, m, of_x)),
    ),
    "the first loss's gradient does not set out": _carried(
        "leave",
        lambda new, ticks, old, y_S, t: new._replace(
            grad_x_S=jnp.where(
                t == ticks.schedule.first_backward, jnp.zeros_like(new.grad_x_S), new.grad_x_S
            )
        ),
    ),
    "microbatches count alike, whatever their weight": after(
        f"{PIPELINING}.split_model:SplitModel.leave", lambda left, *_: _of_weight_one(*left)
    ),
    "a microbatch's report overwrites that of the first": _carried(
        "leave",
        lambda new, ticks, *_: new._replace(
            reported_M=jax.tree.map(lambda a: a.at[0].set(a[-1]), new.reported_M)
        ),
    ),
    "stages have each other's layers": after(
        "praxis_lite.layers.stacking.pipelines:pad_stages",
        lambda tree, *_: jax.tree.map(lambda a: jnp.flip(a, 1), tree),
    ),
}
IN_THE_LAYER = {
    "weights' gradients are of inputs and gradients of different rows": after(
        f"{PIPELINING}.stage_work:StageWork.split", _of_other_rows
    ),
    "a gradient's way between stages is that of x": replaced(
        f"{PIPELINING}.split_ticks:transpose",
        lambda old: lambda function, like, grads: old(function, like, _rolled(function, grads)),
    ),
    "weights' gradients of a tick replace those before": after(
        f"{PIPELINING}.split_ticks:add_at", lambda total, old, part, index: total - old
    ),
    "the last tick is dropped": replaced(
        f"{SCHEDULE}.num_ticks", lambda old: property(lambda self: old.fget(self) - 1)
    ),
    "microbatches are in another order backward": replaced(
        f"{PIPELINING}.split_ticks:_Ticks.backward",
        lambda old: lambda self, saved, grads: old(self, saved, (jnp.flip(grads[0], 0), grads[1])),
    ),
}
DEFECTS = (
    [
        Defect(
            "1F1B: stages hand on the wrong way",
            ThreeStages,
            replaced(f"{TICKS}:shift", lambda old: _a_wrong_way),
            (3, 1, 1),
        ),
        Defect(
            "1F1B: weights' gradients of idle stages are let in",
            InOnePart,
            after(
                f"{INTERLEAVED}.backward",
                lambda work, *_: _places(work, is_valid=lambda x: x | True),
            ),
            MESH,
        ),
    ]
    + [Defect(f"1F1B: {what}", OneForward, planted, MESH) for what, planted in IN_1F1B.items()]
    + [
        Defect(f"split backward pass: {what}", Split, planted, MESH)
        for what, planted in IN_THE_LAYER.items()
    ]
)
