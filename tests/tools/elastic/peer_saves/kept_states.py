"""States in the memory of pretended hosts, each with a device or more of this process."""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from praxis_lite.core import MeshConfig, StateLayout, TrainState, make_mesh
from praxis_tools.elastic.peer_saves.peer_saver import PeerSaver, stores_of
from praxis_tools.elastic.peer_store import PeerStore
from praxis_tools.elastic.worker_assignment import Assignment
from tests.checkpoints.saved_steps import SPECS, true_state

KEY = b"of a job"


class Hosts:
    """Peer stores of members, which stay while generations of processes come and go; a context."""

    def __init__(self, num_members: int):
        self.stores = {member: PeerStore(KEY, "127.0.0.1") for member in range(num_members)}
        self.generation = 0
        self.notes: list[str] = []
        self.before_put = lambda: None
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Hosts":
        for store in self.stores.values():
            self._held.enter_context(store)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def dies(self, *members: int) -> None:
        for member in members:
            self.stores[member].__exit__(None, None, None)
            self.stores[member] = self._held.enter_context(PeerStore(KEY, "127.0.0.1"))

    def order(self, members: Sequence[int], member: int | None = None) -> Assignment:
        return Assignment(
            generation=self.generation,
            member=members[0] if member is None else member,
            members=tuple(members),
            stores=tuple(self.stores[k].address for k in members),
            key=KEY,
            coordinator="",
            num_slots=len(members),
        )

    def clients(self, members: Sequence[int]):
        return [self._held.enter_context(store) for store in stores_of(self.order(members))]

    @contextlib.contextmanager
    def savers(self, members: Sequence[int], layout: StateLayout, mesh):
        """Yields a function that saves as all members do at once, in a new generation."""
        self.generation += 1
        num_each = mesh.size // len(members)
        places = {device: place // num_each for place, device in enumerate(mesh.devices.flat)}
        meeting = Meeting(len(members))
        with contextlib.ExitStack() as held:
            savers = [
                held.enter_context(
                    PeerSaver(
                        self.order(members, member),
                        self.clients(members),
                        layout,
                        mesh,
                        self.notes.append,
                        lambda name, text, k=index: meeting.exchange(k, text),
                        places.__getitem__,
                        self.before_put,
                    )
                )
                for index, member in enumerate(members)
            ]

            def save(
                step: int, state: TrainState, data: Mapping[str, int], *, waits: bool = True
            ) -> None:
                for saver in savers:
                    saver.begin(step, state, data)
                for saver in savers if waits else ():
                    saver.wait()

            def abandon_after(step: int) -> None:
                with ThreadPoolExecutor(len(savers)) as pool:
                    list(pool.map(lambda saver: saver.abandon_after(step), savers))

            save.abandon_after = abandon_after
            yield save


class Meeting:
    """Where the threads of pretended processes meet."""

    def __init__(self, num: int):
        self._barrier, self._texts = threading.Barrier(num), [""] * num

    def exchange(self, index: int, text: str) -> list[str]:
        self._texts[index] = text
        self._barrier.wait(30)
        texts = list(self._texts)
        self._barrier.wait(30)
        return texts


def on_mesh(*shape: int):
    """Returns a mesh, the layout of `true_state` on it, and that state there, padded by NumPy."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape))
    state = with_averages()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    specs = dataclasses.replace(
        SPECS, opt_states={**SPECS.opt_states, "ema": SPECS.mdl_vars["params"]}
    )
    layout = StateLayout(shapes, specs, dict(zip(("replica", "data", "mdl"), shape, strict=True)))

    def place(x: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        padded = np.zeros(abstract.shape, abstract.dtype)
        padded[tuple(slice(dim) for dim in x.shape)] = x
        return jax.device_put(padded, abstract.sharding)

    return mesh, layout, jax.tree.map(place, state, layout.abstract(mesh))


def with_averages() -> TrainState:
    """Returns `true_state` with averages of its weights beside the slots."""
    state = true_state()
    ema = jax.tree.map(lambda x: (x * 3).astype(x.dtype), state.mdl_vars["params"])
    return dataclasses.replace(state, opt_states={**state.opt_states, "ema": ema})
