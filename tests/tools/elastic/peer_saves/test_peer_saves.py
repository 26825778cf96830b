"""Peer saves: whole on any mesh while a single host is lost, and from the disk if more are."""

import threading
import time

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError, PeerLost
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_tools.elastic.peer_saves.newest_state import NewestState
from praxis_tools.elastic.peer_saves.peer_saver import PeerSaver, neighbor_index
from praxis_tools.elastic.peer_saves.pieces import own_pieces
from praxis_tools.elastic.peer_saves.stored_saves import newest_complete_save
from praxis_tools.elastic.store_messages import SaveId, StoreClient
from praxis_tools.elastic.worker_assignment import Assignment
from tests.tools.elastic.peer_saves import kept_states
from tests.tools.elastic.peer_saves.kept_states import Hosts, on_mesh, with_averages

EIGHT = tuple(range(8))


@pytest.fixture
def hosts():
    with Hosts(8) as result:
        yield result


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Returns checkpoints that have the state of step 3, and its data."""
    folder = tmp_path_factory.mktemp("disk")
    mesh, layout, state = on_mesh(1, 4, 2)
    # Not every CPU can look for numbers that are not finite in float16.
    with Checkpoints(folder, saving=SaveSettings(save_non_finite=True)) as checkpoints:
        checkpoints.save(3, state, layout, {"position": 3})
    return Checkpoints(folder)


def newest(checkpoints, hosts, members=EIGHT):
    lines = []
    return NewestState(checkpoints, hosts.clients(members), lines.append), lines


def assert_same(state, step):
    """Asserts that a state has the true values to the bit, zeros around them, and its step."""
    expected = with_averages()
    assert int(state.step) == step
    for tree, other in [
        (state.mdl_vars, expected.mdl_vars),
        (state.opt_states, expected.opt_states),
    ]:
        jax.tree.map_with_path(assert_same_leaf, tree, other)


def assert_same_leaf(path, x, expected):
    actual, cut = np.array(x), tuple(slice(dim) for dim in expected.shape)
    assert actual.dtype == expected.dtype
    assert actual[cut].tobytes() == expected.tobytes(), path
    actual[cut] = np.zeros((), actual.dtype)
    assert not actual.any(), f"padding of {path}"


@pytest.mark.slow
def test_a_state_goes_from_8_to_7_to_5_to_8_devices_as_hosts_die_and_return(hosts, disk):
    step = 10
    with hosts.savers(EIGHT, *reversed(on_mesh(1, 4, 2)[:2])) as save:
        save(step, on_mesh(1, 4, 2)[2], {"position": step})
    members = EIGHT
    for dead, shape in [((3,), (1, 7, 1)), ((0, 5), (1, 1, 5)), ((), (2, 2, 2))]:
        for member in dead:  # One after the other: each is made good before the next.
            hosts.dies(member)
            members = tuple(k for k in members if k != member)
            if member != dead[-1]:
                mesh, layout, state = on_mesh(1, len(members), 1)
                found, _ = newest(disk, hosts, members)
                with hosts.savers(members, layout, mesh) as save:
                    save(step, found.restore(layout, mesh).state, found.latest_data())
        if not dead:
            members = EIGHT
        mesh, layout, _ = on_mesh(*shape)
        found, lines = newest(disk, hosts, members)
        assert (found.step, found.source, lines) == (step, "peers", [])
        restored = found.restore(layout, mesh)
        assert restored.step == step and restored.data == {"position": step}
        assert_same(restored.state, step)
        for x, abstract in zip(
            jax.tree.leaves(restored.state), jax.tree.leaves(layout.abstract(mesh)), strict=True
        ):
            assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
            assert x.sharding == abstract.sharding
        step += 10
        with hosts.savers(members, layout, mesh) as save:
            save(step, restored.state, {"position": step})
    # It is what the disk gives, too.
    jax.tree.map(
        np.testing.assert_array_equal,
        disk.restore(layout, mesh).state.opt_states,
        restored.state.opt_states,
    )
    assert hosts.notes == []


def kept(hosts, *shape, members=EIGHT, steps=(10,)):
    mesh, layout, state = on_mesh(*shape)
    with hosts.savers(members, layout, mesh) as save:
        for step in steps:
            save(step, state, {"position": step})
    return mesh, layout


def test_each_value_is_kept_by_one_process_and_a_neighbor_and_shares_are_even(hosts):
    mesh, layout, _ = on_mesh(2, 2, 2)
    places = {device: place for place, device in enumerate(mesh.devices.flat)}
    kept(hosts, 2, 2, 2)
    true_bytes = sum(
        x.nbytes for x in jax.tree.leaves((with_averages().mdl_vars, with_averages().opt_states))
    )
    assert sum(store.num_bytes for store in hosts.stores.values()) == 2 * true_bytes
    shares = [
        sum(np.prod([b - a for a, b in piece.box]) for piece in own_pieces(
            layout, mesh, process, places.__getitem__))
        for process in range(8)
    ]  # fmt: skip
    assert max(shares) < 2 * np.mean(shares)


def test_whichever_host_dies_the_others_hold_all(hosts):
    kept(hosts, 1, 4, 2)
    for dead in EIGHT:
        choice, reasons = newest_complete_save(hosts.clients([k for k in EIGHT if k != dead]))
        assert choice.step == 10 and reasons == []


def test_a_state_is_not_stored_before_the_files_of_its_steps(hosts):
    kept(hosts, 1, 4, 2)
    number_of_saves = [len(store.saves()) for store in hosts.clients(EIGHT)]

    def fail():
        assert [len(store.saves()) for store in hosts.clients(EIGHT)] == number_of_saves
        raise ConfigError("the store cannot be reached")

    hosts.before_put = fail
    kept(hosts, 1, 4, 2, steps=(13,))
    assert newest_complete_save(hosts.clients(EIGHT))[0].step == 10
    (note,) = hosts.notes
    assert "step 13 failed: ConfigError: the store cannot be reached. The previous" in note


def test_two_that_do_not_hold_each_others_part_may_die(hosts):
    kept(hosts, 1, 4, 2)
    hosts.dies(2, 6)
    assert newest_complete_save(hosts.clients([0, 1, 3, 4, 5, 7]))[0].step == 10


def test_of_two_neighbors_the_disk_serves_and_that_is_said(hosts, disk):
    mesh, layout = kept(hosts, 1, 4, 2)
    hosts.dies(4, 5)
    found, lines = newest(disk, hosts, [0, 1, 2, 3, 6, 7])
    assert (found.step, found.source, found.latest_data()) == (3, "disk", {"position": 3})
    assert_same(found.restore(layout, mesh).state, 3)
    assert lines == ["peer saves: step 10 is incomplete: no host has the part of process 4"]


def test_without_a_disk_it_is_a_new_job(hosts, tmp_path):
    kept(hosts, 1, 4, 2)
    hosts.dies(4, 5)
    found, lines = newest(Checkpoints(tmp_path), hosts)
    assert (found.step, found.source) == (None, "new")
    assert "process 4" in lines[0]


def test_a_newer_step_on_disk_is_used_and_an_equal_one_is_not(hosts, disk):
    kept(hosts, 1, 4, 2, steps=(2,))
    assert newest(disk, hosts)[0].source == "disk"
    kept(hosts, 1, 4, 2, steps=(3,))
    assert newest(disk, hosts)[0].source == "peers"


def flip(hosts, holder, origin):
    (data,) = (
        held.data for save, held in hosts.stores[holder]._saves.items() if save.origin == origin
    )
    data[5] ^= 16


def test_a_flipped_bit_costs_nothing_while_another_holder_has_the_part(hosts, disk):
    mesh, layout = kept(hosts, 1, 4, 2)
    for holder, origin in [(2, 2), (4, 3)]:
        flip(hosts, holder, origin)
    found, lines = newest(disk, hosts)
    assert found.source == "peers"
    assert_same(found.restore(layout, mesh).state, 10)
    assert lines == [
        "peer saves: the part of process 2 is damaged in process 2; the part of process 3 is "
        "damaged in process 4"
    ]


def test_a_bit_that_flips_after_the_choice_is_found_by_its_reader(hosts, disk):
    mesh, layout = kept(hosts, 1, 4, 2)
    found, _ = newest(disk, hosts)
    flip(hosts, 2, 2)
    assert_same(found.restore(layout, mesh).state, 10)
    flip(hosts, 3, 2)
    with pytest.raises(PeerLost, match="by process 2 is damaged or missing"):
        found.restore(layout, mesh)


def test_if_all_holders_of_a_part_are_damaged_the_disk_serves(hosts, disk):
    mesh, layout = kept(hosts, 1, 4, 2)
    for holder in (2, 3):
        flip(hosts, holder, 2)
    found, lines = newest(disk, hosts)
    assert (found.source, found.step) == ("disk", 3)
    assert "step 10 is incomplete: no host has the part of process 2" in lines[0]


def test_the_save_before_is_dropped_once_the_new_one_is_whole_and_not_sooner(hosts, disk):
    kept(hosts, 1, 4, 2, steps=(10, 20))
    one_save = sum(store.num_bytes for store in hosts.stores.values())
    assert {save.number for store in hosts.stores.values() for save in store._saves} == {1}
    hosts.dies(7)  # It comes back, its store empty; the next save is cut short.
    mesh, layout, state = on_mesh(1, 4, 2)
    with hosts.savers(EIGHT, layout, mesh) as save:
        clients = hosts.clients(EIGHT)
        hosts.stores[7].__exit__(None, None, None)
        save(30, state, {})
    assert len(hosts.notes) == 1 and hosts.notes[0].startswith("the peer save of step 30 failed")
    assert "the store of process 7 does not answer" in hosts.notes[0]
    choice, _ = newest_complete_save(clients[:7])
    assert (choice.generation, choice.step) == (1, 20)
    assert sum(store.num_bytes for store in hosts.stores.values()) < one_save


def test_where_the_processes_did_not_meet_both_saves_stay(hosts, monkeypatch):
    mesh, layout, state = on_mesh(1, 4, 2)
    with hosts.savers(EIGHT, layout, mesh) as save:
        save(10, state, {})

        def fails(*args):
            raise PeerLost("process 3 did not come")

        monkeypatch.setattr(kept_states.Meeting, "exchange", fails)
        save(20, state, {})
    assert {save.number for store in hosts.stores.values() for save in store._saves} == {0, 1}
    assert newest_complete_save(hosts.clients(EIGHT))[0].step == 20


def test_a_later_generations_save_is_the_newest_though_its_step_is_smaller(hosts, disk):
    kept(hosts, 1, 4, 2, steps=(10, 20))
    with hosts.savers(EIGHT, *reversed(on_mesh(1, 4, 2)[:2])) as save:  # Rolled back.
        save(15, on_mesh(1, 4, 2)[2], {})
    assert newest(disk, hosts)[0].step == 15


def test_a_run_that_is_rolled_back_leaves_no_save_of_a_later_step(hosts, disk):
    mesh, layout, state = on_mesh(1, 4, 2)
    with hosts.savers(EIGHT, layout, mesh) as save:
        save(10, state, {})
        save.abandon_after(10)
        assert newest(disk, hosts)[0].step == 10
        save.abandon_after(9)
        assert newest(disk, hosts)[0].source == "disk"


def test_parts_of_different_generations_make_no_state(hosts, disk):
    kept(hosts, 1, 4, 2, steps=(10,))
    clients = hosts.clients(EIGHT)
    for origin in range(4):  # As if half of them had saved once more.
        for store in clients:
            before = SaveId(1, 0, origin)
            if before in store.saves():
                held = hosts.stores[clients.index(store)]._saves[before]
                store.put(
                    SaveId(2, 0, origin),
                    held.header,
                    [memoryview(held.data)[: held.num_bytes]],
                    held.num_bytes,
                )
                store.drop(before)
    found, lines = newest(disk, hosts)
    assert found.source == "disk"
    assert "process 4 and process 5 and process 6 and process 7" in lines[0]
    assert "process 0 and process 1 and process 2 and process 3" in lines[0]


def test_a_state_is_kept_as_it_was_though_the_next_step_donates_it(hosts, disk, monkeypatch):
    put, over = StoreClient.put, threading.Event()

    def late(*args):
        assert over.wait(30)
        put(*args)

    monkeypatch.setattr(StoreClient, "put", late)
    mesh, layout, state = on_mesh(1, 4, 2)

    def flipped(x):  # In bits, because not every CPU computes in float16.
        if x.dtype == bool:
            return ~x
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(~bits, x.dtype)

    step = jax.jit(lambda state: jax.tree.map(flipped, state), donate_argnums=0)
    with hosts.savers(EIGHT, layout, mesh) as save:
        save(10, state, {}, waits=False)
        for _ in range(3):
            state = step(state)
        jax.block_until_ready(state)
        over.set()
    assert_same(newest(disk, hosts)[0].restore(layout, mesh).state, 10)


def test_a_save_waits_for_the_one_before_it_and_says_so(hosts, monkeypatch):
    mesh, layout, state = on_mesh(1, 1, 1)
    order, notes, stores = hosts.order((4,)), [], hosts.clients((4,))
    put, when = stores[0].put, []

    def slow(*args):
        time.sleep(0.15)
        put(*args)
        when.append(args[0].number)

    monkeypatch.setattr(stores[0], "put", slow)
    monkeypatch.setattr("praxis_tools.elastic.peer_saves.peer_saver._NOTE_SECONDS", 0.1)
    with PeerSaver(order, stores, layout, mesh, notes.append) as saver:
        for step in (10, 11, 12):
            saver.begin(step, state, {})
            assert len(when) >= step - 10
    assert when == [0, 1, 2]
    assert len(notes) == 1 and "training waited 0." in notes[0]
    assert "run.peer_save_every_steps" in notes[0]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["a:1", "b:1", "c:1"], [1, 2, 0]),
        (["a:1", "a:2", "b:1", "b:2"], [2, 2, 0, 0]),
        (["a:1", "a:2", "a:3"], [1, 2, 0]),
        (["[::1]:1"], [None]),
    ],
)
def test_the_neighbor_is_on_another_host_where_there_is_one(addresses, expected):
    members = tuple(range(len(addresses)))
    actual = [
        neighbor_index(
            Assignment(
                generation=1,
                member=member,
                members=members,
                stores=tuple(addresses),
                key=b"",
                coordinator="",
                num_slots=len(members),
            )
        )
        for member in members
    ]
    assert actual == expected
