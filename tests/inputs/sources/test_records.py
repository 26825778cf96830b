"""TFRecord and ArrayRecord files: examples, checksums, and records that are damaged."""

import gzip
import json
import struct
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import ArrayRecords, TfRecords
from praxis_lite.inputs.sources.faults import BadExample
from tests.support.marks import needs_tensorflow

# Of protocol buffers: a field's number and kind, then its length or value.
IDS = b"\x0a\x03ids\x12\x0f\x1a\x0d\x0a\x0b\x03" + b"\xfc" + b"\xff" * 8 + b"\x01"  # 3, -4
X = b"\x0a\x01x\x12\x08\x12\x06\x0a\x04" + struct.pack("<f", 0.5)
UNPACKED = b"\x0a\x01y\x12\x06\x1a\x04\x08\x07\x08\x0d"  # 7, 13, as older writers have them.
TEXT = b"\x0a\x04text\x12\x06\x0a\x04\x0a\x02a\xff"
TWO = b"\x0a\x03two\x12\x08\x0a\x06\x0a\x01a\x0a\x01b"
NONE = b"\x0a\x04none\x12\x00"


def message(*features):
    entries = b"".join(b"\x0a" + bytes([len(feature)]) + feature for feature in features)
    return b"\x0a" + bytes([len(entries)]) + entries


def masked(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data):
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def write_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def test_features_are_those_of_the_wire_format(tmp_path):
    record = message(IDS, X, UNPACKED, TEXT, TWO, NONE)
    (tmp_path / "a.tfrecord").write_bytes(framed(record) + framed(b""))
    write_records(f"{tmp_path}/a.array_record", [record, b""])
    for source in (TfRecords(f"{tmp_path}/*.tfrecord"), ArrayRecords(f"{tmp_path}/*.array_record")):
        actual = source[0]
        assert actual["ids"].tolist() == [3, -4] and actual["ids"].dtype == np.int64
        assert actual["x"].tolist() == [0.5] and actual["x"].dtype == np.float32
        assert actual["y"].tolist() == [7, 13]
        assert {name: actual[name] for name in ("text", "two", "none")} == {
            "text": b"a\xff",
            "two": [b"a", b"b"],
            "none": [],
        }
        assert source[1] == {}


@pytest.mark.slow
def test_tensorflow_is_not_loaded_for_them(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(framed(message(IDS)))
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from praxis_lite.inputs import TfRecords\n"
        f"assert TfRecords({str(tmp_path / 'a.tfrecord')!r})[0]['ids'][1] == -4\n"
        "assert not {'tensorflow', 'jax'} & sys.modules.keys(), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@needs_tensorflow
@pytest.mark.slow
def test_tensorflow_decodes_the_same_and_its_files_are_read(tmp_path):
    import tensorflow as tf

    rng, examples = np.random.default_rng(0), []
    for n in range(200):
        features = {
            "ids": tf.train.Feature(
                int64_list=tf.train.Int64List(value=rng.integers(-(2**62), 2**62, n % 7))
            ),
            "é": tf.train.Feature(float_list=tf.train.FloatList(value=rng.normal(size=n % 5))),
            "b": tf.train.Feature(
                bytes_list=tf.train.BytesList(value=[rng.bytes(n) for _ in range(n % 3)])
            ),
        }
        examples.append(tf.train.Example(features=tf.train.Features(feature=features)))
    for end, options in ((".tfrecord", None), (".tfrecord.gz", "GZIP")):
        path = f"{tmp_path}/a{end}"
        with tf.io.TFRecordWriter(path, options) as writer:
            for example in examples:
                writer.write(example.SerializeToString())
        source = TfRecords(path)
        source.check()
        assert len(source) == 200
        for n, example in enumerate(examples):
            expected, actual = example.features.feature, source[n]
            np.testing.assert_array_equal(actual["ids"], list(expected["ids"].int64_list.value))
            np.testing.assert_array_equal(actual["é"], list(expected["é"].float_list.value))
            values = list(expected["b"].bytes_list.value)
            assert actual["b"] == (values[0] if len(values) == 1 else values)


def test_what_is_no_example_is_told_with_its_place_and_the_setting(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(framed(message(X)) + framed(b'{"n": 7}'))
    source = TfRecords(f"{tmp_path}/a.tfrecord")
    with pytest.raises(BadExample, match=r"1, .*tf.train.Example.*b'\{") as item:
        source[1]
    assert item.value.fault == "damaged" and "`decode`" in str(item.value)
    assert TfRecords(f"{tmp_path}/a.tfrecord", decode=json.loads)[1] == {"n": 7}


def test_the_place_is_told_of_an_error_of_ones_own_function(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(framed(b"[7]") + framed(b"{"))
    source = TfRecords(f"{tmp_path}/a.tfrecord", decode=json.loads)
    with pytest.raises(ConfigError, match="a.tfrecord.*0"):
        source[0]
    with pytest.raises(json.JSONDecodeError) as caught:
        source[1]
    assert caught.value.__notes__ == [f"It was raised for {tmp_path}/a.tfrecord, row 1."]
    assert TfRecords(f"{tmp_path}/a.tfrecord").fingerprint() != source.fingerprint()


def test_damage_within_an_array_record_is_told_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.array_record"
    records = [json.dumps({"n": n, "x": np.random.default_rng(n).bytes(200).hex()}).encode()
               for n in range(400)]  # fmt: skip
    write_records(str(path), records)
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    source, bad = ArrayRecords(str(path), decode=json.loads), []
    for n in range(400):
        try:
            assert source[n]["n"] == n
        except BadExample as error:
            assert f"{path}, row {n}, cannot be read: " in str(error)
            bad.append(n)
    assert len(bad) == 1


def test_a_tf_record_that_is_cut_off_between_records_is_whole_and_within_one_is_not(tmp_path):
    whole = framed(b"{}") + framed(b'{"n": 1}')
    path = tmp_path / "a.tfrecord"
    for cut in (*range(1, len(whole), 5), len(framed(b"{}"))):
        path.write_bytes(whole[:cut])
        num_rows, is_complete = cut >= len(framed(b"{}")), cut == len(framed(b"{}"))
        # What is missing counts as an example.
        assert len(TfRecords(str(path))) == num_rows + (not is_complete)
        if not is_complete:
            with pytest.raises(BadExample, match=f"a.tfrecord.*record {num_rows:d} "):
                TfRecords(str(path)).check()
    path.write_bytes(b"\xff" + whole)
    with pytest.raises(ConfigError, match="a.tfrecord.*0"):
        TfRecords(str(path)).check()


def test_a_record_of_a_compressed_file_that_says_to_be_huge_is_refused(tmp_path):
    length = struct.pack("<Q", 2**63 + 7)
    (tmp_path / "a.tfrecord.gz").write_bytes(
        gzip.compress(framed(message(X)) + length + masked(length) + b"x" * 50)
    )
    with pytest.raises(BadExample, match="a.tfrecord.gz.*1.*9,223,372,036,854,775,815"):
        TfRecords(f"{tmp_path}/a.tfrecord.gz").check()
