"""Hostile arrays in Zarr 3: each refused in words, within the memory of a small array."""

import json
import re

import numpy as np
import pytest
import tensorstore as ts

from tests.run.checkpoints import looking
from tests.run.checkpoints.hostile_steps import crc32c, frame, raw, repeated, write
from tests.tools.orbax_v1 import write_sharded

READ = """
from praxis_lite.tools.foreign_checkpoints.nnx_checkpoint import NnxCheckpoint

def read(folder):
    for array in NnxCheckpoint(folder).arrays().values():
        array.read()
"""
ROWS, SHARD, INNER = 8, [4, 6], [2, 3]  # Shards of 4 inner chunks of 24 bytes.
CASES = {}


def hostile(words):
    """Registers a change of a database with an array "a", and the words that refuse it."""

    def register(change):
        assert change.__name__ not in CASES
        CASES[change.__name__] = change, words
        return change

    return register


def stored(folder):
    kvstore = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    return json.loads(kvstore["a/zarr.json"])


def says(folder, change):
    """Changes what the metadata says; returns it."""
    metadata = stored(folder)
    change(metadata)
    write(folder, "a/zarr.json", json.dumps(metadata).encode())


def sets(key, value, words):
    """Registers a case of one other entry in the metadata."""

    def change(folder):
        says(folder, lambda metadata: metadata.update({key: value}))

    CASES[f"{key} is {json.dumps(value)[:60]}"] = change, words


def sharding(metadata):
    return metadata["codecs"][0]["configuration"]


def codec(codecs, words):
    """Registers a case of other codecs of the inner chunks."""

    def change(folder):
        says(folder, lambda metadata: sharding(metadata).update(codecs=codecs))

    CASES[f"codecs {json.dumps(codecs)[:90]}"] = change, words


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
for name, configuration in (
    ("gzip", {"level": 5}), ("crc32c", {}), ("transpose", {"order": [1, 0]}), ("numcodecs.x", {}),
    ("blosc", {"cname": "lz4", "clevel": 9, "shuffle": "shuffle", "typesize": 4, "blocksize": 0}),
):
    codec([LITTLE, {"name": name, "configuration": configuration}], "instead of zstd")
codec([LITTLE, {"name": "zstd", "configuration": {"level": "x", "checksum": False}}], "the codec")
codec([LITTLE, {"name": "zstd", "configuration": {"level": 3}}], "instead of zstd")
codec([LITTLE, {**ZSTD, "must_understand": False}], "instead of zstd")
codec([LITTLE, ZSTD, ZSTD], "bytes and zstd")
codec([{"name": "bytes", "configuration": {"endian": "big"}}, ZSTD], "bytes and zstd")
codec([{"name": "bytes"}, ZSTD], "bytes and zstd")
codec([ZSTD], "bytes and zstd")
codec([], "bytes and zstd")
codec({"name": "bytes"}, "bytes and zstd")
codec(
    [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [1, 1], "codecs": [LITTLE], "index_codecs": [LITTLE, {"name": "crc32c"}],
    }}],
    "bytes and zstd",
)
sets("data_type", "string", "the dtype 'string'")
sets("data_type", "r64", "the dtype 'r64'")
sets("data_type", {"name": "numpy.object"}, "the dtype")
sets("fill_value", "NaN", "'fill_value' 'NaN'")
sets("node_type", "group", "'node_type'")
sets("zarr_format", 2, "'zarr_format' 2")
sets("storage_transformers", [{"name": "x"}], "'storage_transformers'")
sets("attributes", {"module": "os"}, "'attributes'")
sets("chunk_key_encoding", {"name": "v2"}, "'chunk_key_encoding'")
sets("shape", [8, -6], "has the shape")
sets("shape", [2**70, 6], "has the shape")
sets("shape", [1] * 99, "has the shape")
sets("shape", [2**40, 2**40], "no computer can hold")
sets("shape", [2**40, 6], "chunks, more than there are")
sets("shape", [8, 6, 1], "chunks of")
sets("shape", [2, 6], r"chunks of \[4, 6\]")
sets("codecs", [], "bytes and zstd")
sets("codecs", None, "bytes and zstd")
sets("codecs", [LITTLE, ZSTD], "holds 24 bytes instead of 96|is not one|cannot be")
for chunks, words in (
    ([0, 6], "chunks of"), ([4, 2**62], "chunks of"), ("x", "chunks of"), ([4], "chunks of"),
):
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    sets("chunk_grid", grid, words)
sets("chunk_grid", {"name": "rectangular", "configuration": {"chunk_shape": [4, 6]}}, "regular")


@hostile("cannot be in the .* bytes stored|has no index|inner chunk at")
def large_shapes_without_data(folder):
    """One shard of 48 GiB, of one inner chunk."""
    shape = [2**33, 6]
    says(folder, lambda metadata: (
        metadata.update(shape=shape),
        metadata["chunk_grid"]["configuration"].update(chunk_shape=shape),
        sharding(metadata).update(chunk_shape=shape),
    ))
    write(folder, "a/c/1/0", None)
    shard(folder, [frame(repeated(0, 2**20, last=True))])


@hostile("has no index of 25769803776 inner chunks")
def an_index_larger_than_its_shard(folder):
    shape = [2**33, 6]
    says(folder, lambda metadata: (
        metadata.update(shape=shape),
        metadata["chunk_grid"]["configuration"].update(chunk_shape=shape),
        sharding(metadata).update(chunk_shape=[2, 1]),
    ))
    write(folder, "a/c/1/0", None)


@hostile("do not divide")
def inner_chunks_that_do_not_fit_their_shard(folder):
    says(folder, lambda metadata: sharding(metadata).update(chunk_shape=[3, 3]))


@hostile("instead of sharding_indexed")
def an_index_at_the_start(folder):
    says(folder, lambda metadata: sharding(metadata).update(index_location="start"))


@hostile("'index_codecs'")
def an_index_without_a_checksum(folder):
    says(folder, lambda metadata: sharding(metadata).update(index_codecs=[LITTLE]))


@hostile("'index_codecs'")
def an_index_that_is_compressed(folder):
    says(folder, lambda metadata: sharding(metadata).update(index_codecs=[LITTLE, ZSTD]))


@hostile("the chunk a/c/1/0 is missing")
def chunks_that_are_missing(folder):
    write(folder, "a/c/1/0", None)
    write(folder, "a/c/9/0", b"x")


@hostile("a chunk that belongs to no array")
def chunks_that_nobody_knows(folder):
    write(folder, "a/c/2/0", b"x")


@hostile("the array 'b' that|a chunk that belongs")
def arrays_of_both_formats(folder):
    write(folder, "b/.zarray", b"{}")


@hostile("is no JSON")
def keys_that_come_twice(folder):
    text = json.dumps(stored(folder))
    write(folder, "a/zarr.json", text.replace("{", '{"shape": [1], ', 1).encode())


@hostile("nested too deeply|is no JSON")
def deep_metadata(folder):
    write(folder, "a/zarr.json", b"[" * 30_000 + b"]" * 30_000)


@hostile("a/zarr.json has 1.* bytes")
def endless_metadata(folder):
    write(folder, "a/zarr.json", json.dumps(stored(folder)).encode() + b" " * 2**17 + b"x")


@hostile("has the shape None")
def metadata_that_is_no_object(folder):
    write(folder, "a/zarr.json", b"[]")


@hostile("belongs to no array|has the shape")
def a_group_at_the_root(folder):
    write(folder, "zarr.json", b'{"zarr_format":3,"node_type":"group"}')


@hostile("in no item")
def names_above(folder):
    write(folder, "../a/zarr.json", json.dumps(stored(folder)).encode())
    for chunk in ("0/0", "1/0"):
        write(folder, f"../a/c/{chunk}", b"x" * 200)


# Shards, written by hand: inner chunks, then the index.

GOOD = frame([raw(np.arange(6, dtype="<f4").tobytes(), last=True)], size=24)


def shard(folder, inner, places=None, crc=None):
    """Writes the first shard: its index says `places`, or the true ones."""
    data, true = b"", []
    for chunk in inner:
        true.append((len(data), len(chunk)))
        data += chunk
    numbers = [number for place in (places or true) for number in place]
    index = np.array(numbers, "<u8").tobytes()
    write(folder, "a/c/0/0", data + index + (crc or crc32c(index)))


SIZE = len(GOOD)
PLACES = [(at * SIZE, SIZE) for at in range(4)]
for name, place, words in (
    ("beyond the file", (2**40, SIZE), "inner chunk at 1099511627776"),
    ("in the index", (4 * SIZE - 1, SIZE), "inner chunk at"),
    ("around the end of 64 bits", (2**64 - SIZE, SIZE), "inner chunk at"),
    ("where another is", (2 * SIZE, SIZE), "inner chunk at|two in one place"),
    ("of no bytes", (3 * SIZE, 0), "cannot be in the 0 bytes"),
    ("missing", (2**64 - 1, 2**64 - 1), "lacks an inner chunk"),
    ("half missing", (2**64 - 1, SIZE), "inner chunk at"),
):

    def misplaced(folder, place=place):
        shard(folder, [GOOD] * 4, [*PLACES[:3], place])

    CASES[f"an inner chunk {name}"] = misplaced, words


@hostile("has no index of 4 inner chunks")
def a_shard_that_is_cut(folder):
    write(folder, "a/c/0/0", b"x" * 67)


@hostile("Digest mismatch")
def an_index_with_a_wrong_checksum(folder):
    shard(folder, [GOOD] * 4, crc=b"abcd")


@hostile("holds 1099511627776 bytes instead of 24")
def an_inner_chunk_that_says_it_is_a_bomb(folder):
    shard(folder, [GOOD] * 3 + [frame(repeated(0, 2**33, last=True), size=2**40)])


@hostile("cannot be read")
def an_inner_chunk_that_is_a_bomb(folder):
    shard(folder, [GOOD] * 3 + [frame(repeated(0, 2**33, last=True))])


@hostile("wants a window of")
def an_inner_chunk_with_a_window_of_a_terabyte(folder):
    shard(folder, [GOOD] * 3 + [frame(repeated(0, 24, last=True), window=30 << 3)])


@hostile("is not one")
def an_inner_chunk_of_another_codec(folder):
    shard(folder, [GOOD] * 3 + [b"\x1f\x8b" + b"\0" * 30])


@hostile("cannot be read|holds")
def an_inner_chunk_that_is_too_short(folder):
    shard(folder, [GOOD] * 3 + [frame([raw(b"x" * 20, last=True)])])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A good database, and those of the cases by name."""
    folder = tmp_path_factory.mktemp("zarr3")
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
    result = {}
    for number, name in enumerate(["good", "by hand", *CASES]):
        result[name] = folder / str(number) / "state"
        result[name].mkdir(parents=True)
        write_sharded(result[name], x, SHARD, INNER)
        if name in CASES:
            CASES[name][0](result[name])
    shard(result["by hand"], [GOOD] * 4)
    return result


@pytest.fixture(scope="module")
def looks(folders):
    return looking.look(READ, folders["good"], folders.values())


def test_a_shard_by_hand_is_good(folders, looks):
    assert len(CASES) >= 60
    for name in ("good", "by hand"):
        assert looks[str(folders[name])]["how"] == "accepted", looks[str(folders[name])]


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_array_is_refused_in_words(folders, looks, name):
    told = looks[str(folders[name])]
    assert told is not None, "the process ended"
    assert told["how"] == "refused", told["words"]
    assert re.search(CASES[name][1], told["words"]), told["words"]
    assert "\n" not in told["words"] and len(told["words"]) < 1500
    assert told["done"] == [] and told["imported"] == []
    outside = [path for path in told["opened"] if not path.startswith(str(folders[name]))]
    assert all(path.startswith(("/proc/", "/sys/fs/cgroup/")) for path in outside), outside
