"""The memory of a host: saves are there whole or not at all, for those who have the key."""

import contextlib
import socket
import threading
import time

import pytest
import xxhash

from praxis_tools.elastic import peer_store, store_messages
from praxis_tools.elastic.peer_store import PeerStore
from praxis_tools.elastic.store_messages import SaveId, StoreClient, StoreFailed

KEY = b"a key of thirty-two bytes or so."
DATA = bytes(range(256)) * 20_011  # More than the 4 MiB that are sent at a time.


@pytest.fixture
def store():
    with PeerStore(KEY, "127.0.0.1") as result:
        yield result


@pytest.fixture
def client(store):
    with StoreClient(store.address, KEY, "process 3") as result:
        yield result


def put(client, save, header=b"a header", data=DATA):
    client.put(save, header, [memoryview(data)[:7], memoryview(data)[7:]], len(data))


def connected(store):
    host, _, port = store.address.rpartition(":")
    return socket.create_connection((host, int(port)), 5.0)


def begin_put(stranger, num_bytes):
    store_messages.greet(stranger, KEY, is_server=False)
    sizes = {"header_bytes": 1, "num_bytes": num_bytes}
    store_messages.send(stranger, {"do": "put", "save": [0, 1, 0], **sizes})
    assert store_messages.receive(stranger) == {}


def test_a_save_is_read_back_whole_and_in_ranges(client):
    put(client, SaveId(2, 5, 3))
    put(client, SaveId(2, 5, 1), b"", b"")
    assert client.saves() == [(2, 5, 1), (2, 5, 3)]
    assert client.header(SaveId(2, 5, 3)) == b"a header"
    assert client.read(SaveId(2, 5, 3), 1000, 2**20) == DATA[1000 : 1000 + 2**20]
    assert client.read(SaveId(2, 5, 1), 0, 0) == b""


def test_a_range_or_a_save_that_is_not_there_is_said(client):
    put(client, SaveId(0, 1, 0))
    with pytest.raises(StoreFailed, match=r"process 3.* from 5 to 5122821"):
        client.read(SaveId(0, 1, 0), 5, len(DATA))
    with pytest.raises(StoreFailed, match="the save does not exist"):
        client.header(SaveId(0, 2, 0))


def test_the_memory_of_a_dropped_save_is_given_back(store, client):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    big, before = bytes(2**26), None
    for generation, number in [(1, 8), (1, 9), (2, 0)]:
        put(client, SaveId(generation, number, 4), data=big)
        before = before or resident()
    client.drop(SaveId(1, 8, 4))
    client.drop(SaveId(1, 8, 4))  # Another process may have done so.
    assert client.saves() == [(1, 9, 4), (2, 0, 4)] and store.num_bytes == 2 * len(big)
    for save in client.saves():
        client.drop(save)
    assert client.saves() == [] and store.num_bytes == 0
    assert resident() < before - len(big) // 2  # It had one of them then, and none now.


def test_a_put_that_was_cut_off_leaves_nothing(store, client):
    with connected(store) as stranger:
        begin_put(stranger, 2**20)
        stranger.sendall(bytes(2**19))
    while store._connections:  # The client's own comes later.
        time.sleep(0.01)
    assert client.saves() == [] and store.num_bytes == 0


def test_bytes_that_are_not_those_of_their_digest_are_no_save(store, client):
    with connected(store) as stranger:
        begin_put(stranger, 4)
        stranger.sendall(b"habcd" + xxhash.xxh3_128(b"habce").digest())
        assert "damaged" in store_messages.receive(stranger)["error"]
    assert client.saves() == []


def test_a_flipped_bit_is_seen(store, client):
    put(client, SaveId(0, 1, 0))
    assert client.is_undamaged(SaveId(0, 1, 0))
    store._saves[SaveId(0, 1, 0)].data[4096] ^= 1
    assert not client.is_undamaged(SaveId(0, 1, 0))


def test_more_than_the_memory_that_is_free_is_refused_before_it_is_sent(store, client, monkeypatch):
    monkeypatch.setattr(peer_store, "available_bytes", lambda: 2**20)
    with pytest.raises(StoreFailed, match=r"1\.0 MiB.*1\.0 MiB are free"):
        client.put(SaveId(0, 1, 0), b"", iter([]), 2**20)


WITHOUT_KEY = {
    "silent": lambda connection: None,
    "garbage": lambda connection: connection.sendall(bytes(range(256)) * 64),
    "another key": lambda c: store_messages.greet(c, b"another", is_server=False),
    "an echo": lambda c: [c.sendall(c.recv(64)) for _ in range(2)],
}


def test_clients_without_the_key_change_nothing_for_others(store, client):
    put(client, SaveId(0, 1, 0))
    left_open = [(connected(store), send) for send in WITHOUT_KEY.values() for _ in range(3)]
    for connection, send in left_open:
        with contextlib.suppress(OSError):
            send(connection)
    began = time.monotonic()
    with StoreClient(store.address, KEY, "process 4") as another:
        for user in (client, another):
            assert user.saves()[0] == (0, 1, 0)
            put(user, SaveId(0, 2, 0))
    assert time.monotonic() - began < 2.0
    assert store._thread.is_alive()
    for connection, _ in left_open:
        connection.close()


def test_silent_strangers_are_left_alone_and_keep_nobody_out(store, client, monkeypatch):
    left_open = [connected(store) for _ in range(3 * peer_store._MAX_UNAUTHENTICATED)]
    assert client.saves() == []
    assert len(store._unauthenticated) <= peer_store._MAX_UNAUTHENTICATED
    for connection in left_open:
        connection.close()


def test_a_store_with_another_key_or_none_is_not_believed(store):
    with pytest.raises(StoreFailed, match="process 1"):
        StoreClient(store.address, b"wrong", "process 1").saves()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        # It repeats what it hears: the proofs of both sides differ.
        def echo():
            connection, _ = impostor.accept()
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(64):
                    connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        address = f"127.0.0.1:{impostor.getsockname()[1]}"
        with pytest.raises(StoreFailed, match="process 2.*different key"):
            StoreClient(address, KEY, "process 2").saves()


def store_threads() -> list[threading.Thread]:
    """Threads of stores that run in this process: other tests' threads may end at any time."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("peer store")]


def test_a_store_that_ended_is_said_and_its_threads_end():
    with PeerStore(KEY, "localhost") as store:
        client = StoreClient(store.address, KEY, "process 3")
        put(client, SaveId(0, 1, 0))
        assert store_threads()
    with pytest.raises(StoreFailed, match="the store of process 3 does not answer"):
        client.saves()
    deadline = time.monotonic() + 5
    while store_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not store_threads() and store.num_bytes == 0
