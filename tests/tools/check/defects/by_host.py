"""The memory of the host: slots, averages and weights left there, or fetched as others."""

import dataclasses

import fiddle as fdl
import jax
import jax.numpy as jnp

from praxis_lite.core.models.stacked_weights import HostWeight
from praxis_lite.core.sharding.memory_spaces import to_device, to_host
from praxis_lite.layers import Repeat
from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, first_part, num_devices

LEARNER = "praxis_lite.core.learner.update"
FETCHED = "praxis_lite.core.models.stacked_weights:HostWeight.to_device"


class Offloaded(tiny.Lm):
    """Slots, averages and the layers' matrices lie on the host."""

    def task(self):
        task = super().task()
        task.learner.host_slots = ".*"
        task.model.stacked_transformer_tpl = fdl.Partial(Repeat, offload_weights=True)
        return task


def _if_split(change):
    return lambda x, *args: change(x, *args) if num_devices() > 1 else x


@jax.custom_vjp
def _rolled(stack):
    return to_host(jnp.roll(to_device(stack), 1, 0))


_rolled.defvjp(lambda stack: (_rolled(stack), None), lambda _, g: (g,))


def _of_the_layer_before(tree, *_):
    is_weight = lambda x: isinstance(x, HostWeight)  # noqa: E731
    moved = lambda x: dataclasses.replace(x, stored=_rolled(x.stored))  # noqa: E731
    return jax.tree.map(lambda x: moved(x) if is_weight(x) else x, tree, is_leaf=is_weight)


CHANGES = {
    "a slot left there": (
        f"{LEARNER}:BoundLearner._updates",
        _if_split(lambda actual, self, grads, norms, slots, weights, loss: (actual[0], slots)),
    ),
    "an average left there": (
        f"{LEARNER}:moving_average",
        _if_split(lambda average, old, params, decay, n: old),
    ),
    "weights fetched for the layer before": (
        "praxis_lite.core.partitioner.train_state:StateLayout.wrap_host_weights",
        _if_split(_of_the_layer_before),
    ),
    "weights fetched in part": (FETCHED, _if_split(lambda x, *_: first_part(x, 2))),
    "gradients of weights left there": (FETCHED, _if_split(lambda x, *_: jax.lax.stop_gradient(x))),
}
DEFECTS = [
    Defect(f"on the host: {what}", Offloaded, after(target, change), (1, 2, 2))
    for what, (target, change) in CHANGES.items()
] + [
    # What a program rounds is compared as it is trained, in float32.
    Defect(
        "on the host: weights rounded on the way",
        Offloaded,
        after(FETCHED, _if_split(lambda x, *_: x.astype(jnp.bfloat16).astype(x.dtype))),
        (1, 2, 2),
        ("as trained",),
    ),
]
