"""Faults to plant in a job: a device that computes wrongly, copies that drift, a stale leaf."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from unittest import mock

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from praxis_lite import MeshConfig
from praxis_lite.config.build import build
from praxis_lite.core.learner import update as learner_update
from praxis_lite.core.learner.gradient_limits import GradientLimits
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.partitioner.task_on_mesh import TaskOnMesh
from praxis_lite.core.sharding.leaf_paths import leaves_with_path, path_of
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.experiment.registry import get_experiment
from praxis_lite.inputs import InMemory
from praxis_lite.inputs.base import TRAIN
from praxis_lite.models import FunctionModel
from praxis_lite.trainer.job_on_mesh import partitioner_on
from praxis_tools.certificates.certifier import Certifier
from praxis_tools.certificates.diagnosis import (
    CauseSearch,
    replica_differences,
    restored_state_differences,
)
from praxis_tools.certificates.state_digests import StateDigests
from praxis_tools.check.parts.data import fold_ids
from praxis_tools.check.shrink import shrink_config
from tests.tools.certificates.faults import Fault
from tests.tools.check import tiny
from tests.tools.check.defects.defect import TRAINING
from tests.tools.check.defects.families import FAMILIES

# Elements of the wide layer, over which a device that is wrong in 1 of 10,000 is to be found.
HIDDEN, CLASSES, ROWS = 16_384, 3, 8
_LARGE = ("PyDocs", "ChatDpo", "lm.Llama")  # Registered experiments, of which smaller ones stand.


@dataclasses.dataclass
class BadDevice:
    """A device whose products have their last bit wrong in an element of 10,000.

    Attributes:
      id: of the device, or None: none is bad.
      layer: "first" or "last".
      bit: that is turned, from the last.
    """

    id: int | None = None
    layer: str = "first"
    bit: int = 0


BAD = BadDevice()
_traced: list[jax.sharding.Mesh] = []


def _is_bad_here(layer: str) -> jax.Array:
    """Returns True on the bad device: a program knows places, and the mesh who is there."""
    mesh = _traced[-1]
    is_bad = [d.id == BAD.id and layer == BAD.layer for d in mesh.devices.flat]
    return jnp.asarray(is_bad)[jax.lax.axis_index(mesh.axis_names)]


def _turned(y: jax.Array, layer: str) -> jax.Array:
    index = jax.lax.broadcasted_iota(jnp.uint32, (y.size,), 0).reshape(y.shape)
    is_hit = (index % jnp.uint32(10_000) == 1234 % max(y.size, 1)) & _is_bad_here(layer)
    bits = jax.lax.bitcast_convert_type(y, jnp.uint32)
    return jax.lax.bitcast_convert_type(
        jnp.where(is_hit, bits ^ jnp.uint32(1 << BAD.bit), bits), y.dtype
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, w, layer):
    return _turned(x @ w, layer)


def _product_bwd(layer, saved, g):
    x, w = saved
    return _turned(g @ w.T, layer), _turned(x.T @ g, layer)


_product.defvjp(lambda x, w, layer: (_turned(x @ w, layer), (x, w)), _product_bwd)


def product(x, w, layer):
    """Returns x @ w, rows split over data and features over mdl, each device by itself."""
    with jax.named_scope(layer):
        return jax.shard_map(
            lambda x, w: _product(x, w, layer),
            in_specs=(P("data", None), P(None, "mdl")),
            out_specs=P("data", "mdl"),
            check_vma=False,
        )(x, w)


def init_wide(key):
    """Returns the weights of a wide layer, and of a narrow one."""
    first, last = jax.random.split(key)
    return {
        "first": {"w": jax.random.normal(first, (8, HIDDEN)) * 0.3},
        "last": {"w": jax.random.normal(last, (HIDDEN, CLASSES)) * 0.01},
    }


class WideTask(tiny.PointsTask):
    """PointsTask of two products, the first of which devices make by themselves."""

    def logits(self, model, inputs, key):
        """Returns logits [B, 3] of points [B, 6]."""
        x = jnp.pad(inputs["inputs"], ((0, 0), (0, 2)))
        hidden = jnp.tanh(product(x, model["first"]["w"], "first"))
        with jax.named_scope("last"):
            return hidden @ model["last"]["w"]


class Wide(tiny.Points):
    """Points with a hidden layer wide enough for a fault in one of 10,000."""

    def task(self):
        specs = {"first": {"w": (None, "mdl")}, "last": {"w": ("mdl", None)}}
        return fdl.Config(
            WideTask,
            fdl.Config(FunctionModel, init_wide, specs=specs),
            tiny.learner(),
            inputs_split_mapping={"map_1d": ("data",), "map_2d": ("data", None)},
        )

    def datasets(self):
        return {"train": fdl.Config(InMemory, tiny.points, batch_size=2 * ROWS, shuffle=True)}


@contextlib.contextmanager
def bad_device(device: int, layer: str = "first", bit: int = 0) -> Iterator[None]:
    """Plants a device that computes wrongly, wherever a mesh has it."""
    tracing = TaskOnMesh.tracing

    @contextlib.contextmanager
    def knowing(self):
        _traced.append(self.mesh)
        try:
            with tracing(self):
                yield
        finally:
            _traced.pop()

    planted = {"id": device, "layer": layer, "bit": bit}
    with mock.patch.object(TaskOnMesh, "tracing", knowing), mock.patch.multiple(BAD, **planted):
        yield


class Job:
    """A job that has made some steps, with what its certificates need.

    Args:
      experiment: a class, or the name of a registered one, of which a smaller model is taken.
      shape: of its mesh.
    """

    def __init__(self, experiment, shape, num_steps: int = 1, seed: int = 0):
        if isinstance(experiment, str):
            config = get_experiment(experiment)().config()
            if any(some in experiment for some in _LARGE):
                config = shrink_config(config)[0]
        else:
            config = experiment().config()
        self.job, self.seed = build(config), seed
        axes = tuple(self.job.mesh.axis_names)
        self.mesh = make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=axes))
        self.pipeline = self.job.datasets[TRAIN]
        self.own = self.build(self.mesh)
        self.key, self.step = self.own.key(seed), 0
        self.batches = itertools.chain.from_iterable(
            self.pipeline.batches() for _ in itertools.count()
        )
        self.state = self.own.init(self.key)
        for _ in range(num_steps):
            self.train()

    def build(self, mesh):
        return partitioner_on(self.job, mesh)

    def train(self) -> None:
        """Makes a step."""
        batch = {name: np.asarray(x) for name, x in next(self.batches).items()}
        batch, _ = fold_ids(batch, self.job.task.num_ids())  # A smaller model has fewer ids.
        self.batch = self.own.global_batch(batch)
        self.state, _ = self.own.train_step(self.state, self.batch, self.key)
        self.step += 1

    def certifier(self) -> Certifier:
        """Returns the certifier of the job, compiled."""
        spec = self.pipeline.element_spec()
        certifier = Certifier(self.own, self.build, spec, self.seed, self.state)
        certifier.compile_in_thread()
        certifier.check_memory()
        return certifier


def with_copy(x: jax.Array, places, change) -> jax.Array:
    """Returns an array of which the devices at some places hold other values than the others."""
    devices = list(x.sharding.mesh.devices.flat)
    wrong = {devices[i] for i in places}
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device in wrong:
            data = change(data)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def one_bit(data: np.ndarray) -> np.ndarray:
    """Returns an array with the last bit of its first element turned."""
    result = np.array(data, order="C")
    result.reshape(-1).view(np.uint8)[0] ^= 1
    return result


def difference(job: Job):
    """Returns the difference that the first three certificates of a job find, or None.

    A last bit in an element of a few thousand may be rounded away in all sums that it enters.
    """
    certifier, found = job.certifier(), None
    for _ in range(3):
        made = certifier.certify(job.state, job.batch, job.key, job.step)
        if made.failed:
            found = CauseSearch(certifier, made).find()
            break
        job.train()
    certifier.close()
    return found


def devices() -> list[Fault]:
    """Returns devices that compute wrongly: the last bit of an element in 10,000, and others."""

    def found(device, shape, layer, bit):
        with bad_device(device, layer, bit):
            return difference(Job(Wide, shape))

    kinds = [
        (device, shape, bit)
        for shape, some in (((2, 4), (0, 5)), ((4, 2), (3, 6)), ((8, 1), (1, 7)), ((2, 2), (2, 3)))
        for device, bit in zip(some, (0, 9), strict=True)
    ] + [(4, (2, 4), 20), (2, (4, 1), 0)]
    return [
        Fault(
            f"device {device} of mesh {shape} turns bit {bit} of an element in 10,000",
            functools.partial(found, device, shape, "first", bit),
            device,
            layer="first",
        )
        for device, shape, bit in kinds
    ]


def copies() -> list[Fault]:
    """Returns copies of an array that drift apart, by one bit on one device."""

    def found(shape, leaf, place):
        job = Job(tiny.Points, shape)
        state = changed(job.state, leaf, lambda x: with_copy(x, [place], one_bit))
        digests = StateDigests(job.own.layout, job.mesh)(state)
        return next(iter(replica_differences(job.own.layout, job.mesh, digests)), None)

    kinds = [
        ((4, 2), "mdl_vars/params/first/b", 3, "data"),
        ((2, 4), "mdl_vars/params/first/b", 0, "data"),
        ((4, 2), "opt_states/num_updates", 6, "data+mdl"),
        ((8, 1), "step", 7, "data"),
        ((1, 4), "opt_states/num_skipped_steps", 2, "mdl"),
        ((4, 2), "opt_states/ema/first/b", 5, "data"),
    ]
    return [
        Fault(
            f"a copy of {leaf} on device {place} of mesh {shape} drifts",
            functools.partial(found, shape, leaf, place),
            place,
            axis=axis,
            leaf=leaf,
        )
        for shape, leaf, place, axis in kinds
    ]


def restored() -> list[Fault]:
    """Returns states of which a host has an array, or a block of it, of an earlier step."""

    def found(shape, leaf, places, now):
        job = Job(tiny.Points, shape)
        blocks = blocks_of(job.state, leaf)
        job.train()
        saved = StateDigests(job.own.layout, job.mesh)(job.state).to_save()
        there = Job(tiny.Points, now, num_steps=2)
        if now == shape:
            devices = [job.mesh.devices.flat[i] for i in places]
            state = changed(there.state, leaf, lambda x: replaced_blocks(x, devices, blocks))
        else:
            state = changed(there.state, leaf, lambda x: with_copy(x, places, one_bit))
        digests = StateDigests(there.own.layout, there.mesh)(state)
        result = restored_state_differences(there.own.layout, there.mesh, saved, digests)
        copies = replica_differences(there.own.layout, there.mesh, digests)
        return next(iter([*copies, *result]), None)

    kinds = [
        ((4, 2), "mdl_vars/params/first/w", (5,), (4, 2)),
        ((2, 4), "mdl_vars/params/last/w", (2,), (2, 4)),
        ((2, 4), "mdl_vars/params/first/b", (1,), (2, 4)),
        ((4, 2), "opt_states/ema/first/w", (0, 1, 2, 3), (4, 2)),
        ((2, 2), "mdl_vars/params/last/w", (3,), (2, 2)),
        ((2, 4), "opt_states/ema/last/w", (0,), (2, 4)),
    ]
    return [
        Fault(
            f"devices {places} of mesh {shape} have {leaf} of an earlier step",
            functools.partial(found, shape, leaf, places, now),
            places[0],
            leaf=leaf,
        )
        for shape, leaf, places, now in kinds
    ]


def update_difference(job: Job, spoil=lambda state: state, num_steps: int = 1):
    """Returns the difference that certificates of steps find in the state after them, or None.

    Args:
      spoil: called with each new state; returns the one that is there instead.
      num_steps: how many steps to certify, until one differs.
    """
    certifier, found = job.certifier(), None
    for _ in range(num_steps):
        certifier.take_snapshot(job.state, job.step)
        job.train()
        job.state = spoil(job.state)
        digests = StateDigests(job.own.layout, job.mesh)(job.state)
        found = next(iter(replica_differences(job.own.layout, job.mesh, digests)), None)
        made = certifier.certify(job.state, job.batch, job.key, job.step)
        if found is None and made.failed:
            found = CauseSearch(certifier, made).find()
        if found is not None:
            break
    certifier.close()
    return found


def spoiled_states() -> list[Fault]:
    """Returns states of which a device holds a wrong bit, or an old block, after an update."""

    def found(experiment, shape, leaf, place, is_old):
        job = Job(experiment, shape, num_steps=2)
        old = blocks_of(job.state, leaf)
        device = job.mesh.devices.flat[place]
        change = (
            (lambda x: replaced_blocks(x, [device], old))
            if is_old
            else (lambda x: with_copy(x, [place], one_bit))
        )
        return update_difference(job, lambda state: changed(state, leaf, change))

    kinds = [
        (tiny.Points, (2, 2), "mdl_vars/params/first/w", 3, False, "data 1, mdl 1"),
        (tiny.Points, (2, 2), "mdl_vars/params/first/b", 1, False, "data"),
        (tiny.Points, (2, 2), "opt_states/slots/unstacked/0/nu/last/w", 0, False, "data 0, mdl 0"),
        (tiny.Points, (2, 2), "opt_states/ema/first/w", 2, False, "data 1, mdl 0"),
        (tiny.Points, (2, 2), "opt_states/slots/unstacked/0/mu/first/w", 1, True, "data 0, mdl 1"),
        (tiny.Points, (4, 2), "opt_states/ema/last/w", 5, True, "data 2, mdl 1"),
        (tiny.Points, (4, 2), "opt_states/slots/unstacked/0/count", 6, True, "data+mdl"),
        (tiny.Lm, (1, 2, 2), "mdl_vars/params/softmax/logits_ffn/linear/w", 2, False, "data 1"),
    ]
    return [
        Fault(
            f"{'an old block' if is_old else 'a wrong bit'} of {leaf} on device {place} of mesh "
            f"{shape}, after an update",
            functools.partial(found, experiment, shape, leaf, place, is_old),
            place,
            axis=axis,
            leaf=leaf,
        )
        for experiment, shape, leaf, place, is_old, axis in kinds
    ]


def changed_updates(*changes):
    """Returns a patch of updates: each change is called with the new trees and those before."""
    update = BoundLearner.update

    def changed_update(self, grads, opt_states, params, loss):
        new, states, *rest = update(self, grads, opt_states, params, loss)
        after, before = {"params": new, **states}, {"params": params, **opt_states}
        for change in changes:
            after = change(after, before)
        new = after.pop("params")
        return new, after, *rest

    return mock.patch.object(BoundLearner, "update", changed_update)


def wrong_leaves():
    """Returns changes of single arrays by name, each with the path of its array."""

    def kept(*ends):
        """Returns a change that leaves arrays as they were before."""
        return lambda new, old: jax.tree.map_with_path(
            lambda path, a, b: b if path_of(path).endswith(ends) else a, new, old
        )

    def undecayed(end):
        rate, decay = 0.01, 0.1  # Of tiny.learner.
        return lambda new, old: jax.tree.map_with_path(
            lambda path, a, b: a + rate * decay * b if path_of(path) == f"params/{end}" else a,
            new,
            old,
        )

    def half(end):
        """Returns a change that leaves the rows of half of the devices as they were before."""

        def rows(path, a, b):
            if not path_of(path).endswith(end):
                return a
            is_old = jax.lax.broadcasted_iota(jnp.int32, a.shape, 0) < a.shape[0] // 2
            return jnp.where(is_old, b, a)

        return lambda new, old: jax.tree.map_with_path(rows, new, old)

    slots = "opt_states/slots/unstacked/0"
    return {
        "the average of one weight that is not updated": (
            kept("ema/last/w"),
            "opt_states/ema/last/w",
        ),
        "a weight without its decay": (undecayed("last/w"), "mdl_vars/params/last/w"),
        "an optimizer's count that stays": (kept("0/count"), f"{slots}/count"),
        "a count of updates that stays": (kept("num_updates"), "opt_states/num_updates"),
        "a first moment that stays": (kept("mu/first/b"), f"{slots}/mu/first/b"),
        "a second moment that half of the devices leave": (
            half("nu/first/w"),
            f"{slots}/nu/first/w",
        ),
    }


def wrong_programs():
    """Returns patches of updates of all arrays by name, each with a part of the arrays' paths."""
    update, of_optimizer = BoundLearner.update, BoundLearner._updates

    def twice(self, grads, opt_states, params, loss):
        once, states, *_ = update(self, grads, opt_states, params, loss)
        return update(self, grads, states, once, loss)

    def scaled(by):
        def updates(self, *args):
            result, slots = of_optimizer(self, *args)
            return jax.tree.map(lambda u: by * u, result), slots

        return mock.patch.object(BoundLearner, "_updates", updates)

    return {
        "an average that is not updated": (
            mock.patch.object(learner_update, "moving_average", lambda average, *_: average),
            "opt_states/ema/",
        ),
        "an average of the new weights": (
            changed_updates(
                lambda new, old: {
                    **new,
                    "ema": jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, old["ema"], new["params"]),
                }
            ),
            "opt_states/ema/",
        ),
        "an update that is made twice": (mock.patch.object(BoundLearner, "update", twice), ""),
        "weights that are updated twice": (
            mock.patch.object(
                optax,
                "apply_updates",
                lambda params, updates: jax.tree.map(lambda w, u: w + 2 * u, params, updates),
            ),
            "mdl_vars/params/",
        ),
        "a learning rate of 1.01 times": (scaled(1.01), "mdl_vars/params/"),
        "gradients that are not clipped": (
            mock.patch.object(GradientLimits, "clipped", lambda self, grads, grad_norm: grads),
            "",
        ),
    }


def wrong_updates() -> list[Fault]:
    """Returns programs whose update is wrong, on every device and mesh alike."""
    kinds = wrong_programs() | {
        name: (changed_updates(change), leaf) for name, (change, leaf) in wrong_leaves().items()
    }

    def found(patch):
        with patch:
            return update_difference(Job(tiny.Points, (2, 2)))

    # Two of the four devices hold the rows that the program leaves.
    places = {"a second moment that half of the devices leave": 0}
    return [
        Fault(name, functools.partial(found, patch), places.get(name), leaf=leaf)
        for name, (patch, leaf) in kinds.items()
    ]


def programs() -> list[Fault]:
    """Returns programs that are wrong on the job's mesh, and right on others."""

    def found(defect):
        with defect.planted():
            return difference(Job(defect.experiment, defect.mesh))

    return [
        Fault(
            f"{defect.name}, on mesh {defect.mesh}",
            functools.partial(found, defect),
            axis=defect.axis or "mdl",
            layer=defect.layer,
        )
        for defects in FAMILIES.values()
        for defect in defects
        if defect.experiment is tiny.Collectives and defect.parts == TRAINING
    ]


def leaf_of(state, leaf: str) -> jax.Array:
    """Returns an array of a state by its path."""
    return dict(leaves_with_path(state))[leaf]


def blocks_of(state, leaf: str) -> dict[jax.Device, np.ndarray]:
    """Returns the blocks of an array of a state by device."""
    return {s.device: np.array(s.data) for s in leaf_of(state, leaf).addressable_shards}


def changed(state, leaf: str, change):
    """Returns a state with one of its arrays changed."""
    assert leaf in dict(leaves_with_path(state)), [path for path, _ in leaves_with_path(state)]
    return jax.tree.map_with_path(lambda p, x: change(x) if path_of(p) == leaf else x, state)


def replaced_blocks(x: jax.Array, devices, blocks) -> jax.Array:
    """Returns an array of which some devices hold other blocks."""
    shards = [
        jax.device_put(blocks[s.device] if s.device in devices else np.array(s.data), s.device)
        for s in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
