"""Time split over devices: masks, positions and blocks that go wrong on their way round."""

import dataclasses

import jax
import jax.numpy as jnp

from praxis_lite.layers import set_sharding_params
from tests.tools.check import tiny
from tests.tools.check.defects.defect import Defect, after, num_devices, replaced

KERNELS = "praxis_lite.layers.attention.kernels"
RING = f"{KERNELS}.ring_groups:Ring"
MESH = (1, 1, 4)  # Eight tokens: two on each of four devices.


class Round(tiny.Lm):
    """Keys and values go round a ring."""

    word = "fsdp+context_ring"

    def task(self):
        task = super().task()
        task.model = set_sharding_params(task.model, self.word)
        return task


class Gathered(Round):
    """All keys and values are gathered."""

    word = "fsdp+context_gather"


class ByHeads(Round):
    """Devices exchange time for heads, of which there are fewer than devices."""

    word = "fsdp+context_heads"


def _sent(change):
    """Returns a planter of `change(old, ring, tree, step)`."""

    def new(old):
        return lambda self, tree, step: change(old, self, tree, step)

    return replaced(f"{RING}.shift", new)


def _pieces(change):
    """Returns a planter of other arguments of the masks of a group's pieces."""

    def new(old):
        return lambda self, step, *arrays: old(self, change(step), *arrays)

    return replaced(f"{KERNELS}.ring_attention:ChunkedBlocks._pieces", new)


def _without(**fields):
    return lambda step: step._replace(mask=dataclasses.replace(step.mask, **fields))


def _starts(change):
    def new(old):
        return lambda self, station, length: [
            (change(self, start, length), size) for start, size in old(self, station, length)
        ]

    return replaced(f"{RING}.starts", new)


def _exchanged(name, change):
    def new(old):
        return lambda self, x: change(old, self, x)

    return replaced(f"{RING}.{name}", new)


def _next_device(old, ring, x):
    return jax.lax.ppermute(
        old(ring, x), ring.axes, [(i, (i + 1) % ring.num) for i in range(ring.num)]
    )


def _first_log_sums(joined, *parts):
    return joined[0], parts[0][1]


IN_A_RING = {
    "blocks are not sent on": _sent(
        lambda old, ring, tree, step: tree if step == 1 else old(ring, tree, step)
    ),
    "blocks are sent the other way": _sent(lambda old, ring, tree, step: old(ring, tree, -step)),
    "blocks are sent one too far": _sent(
        lambda old, ring, tree, step: old(ring, tree, step + (step > 0))
    ),
    "gradients of keys do not come home": _sent(
        lambda old, ring, tree, step: tree if step < 0 else old(ring, tree, step)
    ),
    "gradients of keys come home one too early": _sent(
        lambda old, ring, tree, step: old(ring, tree, step + (step < 0))
    ),
    "the last station is left out": after(
        f"{KERNELS}.ring_attention:_num_steps", lambda x, *_: max(x - 1, 1)
    ),
    "the mask is lost after the first station": _pieces(
        lambda step: (
            step
            if isinstance(step.offset, int) and step.offset == 0
            else _without(right_context=None)(step)
        )
    ),
    "the mask is that of the station itself": _pieces(lambda step: step._replace(offset=0)),
    "the mask is that of another station": _pieces(
        lambda step: step._replace(offset=step.offset + 1)
    ),
    "a window is begun": _pieces(_without(left_context=3)),
    "positions begin anew on each device": _starts(lambda ring, start, length: start * 0),
    "positions are one device off": _starts(
        lambda ring, start, length: (start + length) % (length * ring.num_groups)
    ),
    "pieces of the zig-zag are exchanged": replaced(
        f"{RING}._swap_if_odd", lambda old: lambda self, x, y: (x, y)
    ),
    "the zig-zag is not undone": replaced(f"{RING}.from_zigzag", lambda old: lambda self, x: x),
    "parts are joined with equal shares": replaced(
        f"{KERNELS}.ring_attention:merge_by_logsumexp",
        lambda old: lambda *parts: (sum(x for x, _ in parts) / len(parts), old(*parts)[1]),
    ),
    "log sums are of the first part": after(
        f"{KERNELS}.ring_attention:merge_by_logsumexp", _first_log_sums
    ),
    "the softmax's derivative is of a device's own keys": after(
        f"{KERNELS}.ring_attention:inner_products", lambda x, *_: x / num_devices("mdl")
    ),
}
DEFECTS = [
    Defect(f"ring: {what}", Round, planted, MESH, axis="mdl") for what, planted in IN_A_RING.items()
]
DEFECTS += [
    Defect(f"gathered keys: {what}", Gathered, planted, MESH, axis="mdl")
    for what, planted in {
        "positions begin anew on each device": _starts(lambda ring, start, length: start * 0),
        "the zig-zag is not undone": IN_A_RING["the zig-zag is not undone"],
        "the mask is lost": replaced(
            f"{KERNELS}.context_parallel:mask_of_queries",
            lambda old: (
                lambda mask, *rest: dataclasses.replace(old(mask, *rest), right_context=None)
            ),
        ),
    }.items()
]
DEFECTS += [
    Defect(f"shared heads: {what}", ByHeads, planted, MESH, axis="mdl")
    for what, planted in {
        "outputs go to the next device": _exchanged("by_time", _next_device),
        "heads are of the next device": _exchanged("by_heads", _next_device),
        "time is in another order": _exchanged(
            "by_heads", lambda old, ring, x: jnp.flip(old(ring, x), 1)
        ),
    }.items()
]
