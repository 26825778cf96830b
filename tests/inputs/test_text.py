"""The corpus: what is held out, what stands in the stream, and what a user's files may lack."""

import gzip
import hashlib
import os

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs import ByteTokenizer, TextCorpus, TokenIds

EOS = 256


@pytest.fixture
def folder(tmp_path):
    """Two files of 40 and 25 blocks, one of them in a folder below."""
    (tmp_path / "below").mkdir()

    def lines(name, num_bytes):
        return b"".join(
            f"{name}, line {i:09d}, \xe9, of 37 byte.\n".encode() for i in range(num_bytes // 37)
        )

    assert len(lines("one", 37)) == 37
    (tmp_path / "one.txt").write_bytes(lines("one", 40 * 16384))
    (tmp_path / "below" / "two.txt").write_bytes(lines("two", 25 * 16384))
    return tmp_path


def test_tokenizer_returns_what_it_was_given_up_to_the_end():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve ∂x\n")
    assert ids.dtype == np.int32
    assert ids.tolist() == list("naïve ∂x\n".encode())
    assert tokenizer.decode(ids) == "naïve ∂x\n"
    assert tokenizer.decode([*ids, EOS, 65, 66]) == "naïve ∂x\n"
    assert tokenizer.encode(b"\xff").tolist() == [255]
    assert tokenizer.decode([65, 0xC3, 66, 262, -1]) == "A\ufffdB\ufffd\ufffd"


def test_language_reference_is_split_by_the_topics_names():
    from pydoc_data.topics import topics

    def held_out(name):
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0

    corpus = TextCorpus()
    heldout, train = (dict(corpus.documents(split)) for split in ("heldout", "train"))
    assert heldout == {name: topics[name].encode() for name in topics if held_out(name)}
    assert set(train) == {name for name in topics if not held_out(name)}
    # Of training only what is held out elsewhere is missing.
    kept = sum(map(len, train.values()))
    whole = sum(len(topics[name].encode()) for name in train)
    assert 0.9 * whole < kept < whole
    # A tenth by topic happens to be a tenth by bytes; gzip needs 2.5 bits for each, and 2.38 of the
    # text of Python 3.14.
    assert 40_000 < corpus.num_bytes("heldout") < 80_000
    assert corpus.gzip_bits_per_byte("heldout") == pytest.approx(2.45, abs=0.1)


def test_stream_is_the_documents_between_ends(folder):
    corpus = TextCorpus(str(folder / "*.txt"))
    documents = corpus.documents("train")
    expected = [EOS]
    for _, text in documents:
        expected += [*text, EOS]
    stream = corpus.tokens("train")
    assert stream.dtype == np.int32
    assert stream.tolist() == expected
    assert corpus.num_bytes("train") + len(documents) == len(stream) - 1

    data = b"".join(text + b"\0" for _, text in documents)
    path = folder / "data"
    path.write_bytes(gzip.compress(data, 9))
    bits = 8 * os.path.getsize(path) / (len(stream) - 1)
    assert corpus.gzip_bits_per_byte("train") == pytest.approx(bits)


def test_files_are_cut_at_line_ends_and_nothing_is_lost(folder):
    corpus = TextCorpus(f"{folder}/**/*.txt, {folder}/one.txt")
    documents = dict(corpus.documents("train") + corpus.documents("heldout"))
    for path, name in (folder / "one.txt", "one.txt"), (folder / "below" / "two.txt", "two.txt"):
        blocks = [documents.pop(f"{name}#{k}") for k in range(1000) if f"{name}#{k}" in documents]
        assert b"".join(blocks) == path.read_bytes()
        assert all(block.endswith(b"\n") and len(block) <= 16384 for block in blocks)
    assert not documents, "a file that two globs name is read once"


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_paragraph_that_is_held_out_is_not_trained_on(tmp_path, line_end):
    repeated = "This paragraph of more than forty bytes stands in both topics."
    local = "And this one, long enough too, is the training topic's own."
    short = "Too short to tell."
    # By the hash of their names d#0 is held out and a#0 is not.
    between = 2 * line_end
    (tmp_path / "a").write_bytes(between.join((local, repeated, short)).encode())
    (tmp_path / "d").write_bytes(between.join((repeated, short)).encode())
    corpus = TextCorpus(str(tmp_path / "*"))
    assert corpus.documents("train") == [("a#0", f"{local}{between}{short}".encode())]
    assert corpus.documents("heldout") == [("d#0", f"{repeated}{between}{short}".encode())]


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ("{local}\n\n{held_out}\n", "{local}"),
        ("{held_out}\n", None),
        ("{local}\n\n\n{held_out}", "{local}"),
        ("{local}\n  \n{held_out}\n\t\n{local}\n", "{local}\n\t\n{local}\n"),
        ("{local}\r\n\r\n    {held_out}\r\n", "{local}"),
        ("{local}\r\r{held_out}\r", "{local}"),
    ],
)
def test_whitespace_does_not_hide_a_paragraph_that_is_held_out(tmp_path, training, expected):
    names = {
        "local": "This paragraph of more than forty bytes is only in training.",
        "held_out": "This paragraph of more than forty bytes\nis at the end of a file.",
    }
    (tmp_path / "a").write_bytes(training.format(**names).encode())
    (tmp_path / "d").write_bytes("First.\n\n{held_out}\n".format(**names).encode())
    (tmp_path / "e").write_bytes(b"Another document.\n")
    documents = dict(TextCorpus(str(tmp_path / "[ade]"), heldout_percent=10).documents("train"))
    assert documents.get("a#0") == (None if expected is None else expected.format(**names).encode())


@pytest.mark.parametrize("name", ["a.JSONL", "a.txt"])
def test_json_lines_are_text_with_a_warning(tmp_path, caplog, name):
    (tmp_path / name).write_text('{"text": "one"}\n')
    documents = TextCorpus(str(tmp_path / name), heldout_percent=0).documents("train")
    assert documents == [(f"{name}#0", b'{"text": "one"}\n')]
    assert ("JsonLines" in caplog.text) == (name == "a.JSONL")


def test_a_line_longer_than_a_block_is_cut(tmp_path):
    (tmp_path / "long").write_bytes(b"x" * 40_000)
    corpus = TextCorpus(str(tmp_path / "long"), heldout_percent=0)
    assert [len(text) for _, text in corpus.documents("train")] == [16384, 16384, 40_000 - 32768]


def test_tilde_and_literal_brackets(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "one.txt").rename(folder / "one[1].txt")
    assert TextCorpus("~/one[1].txt").documents("train")[0][0].startswith("one[1].txt#")


def test_more_held_out_keeps_what_was_held_out():
    names = {
        percent: {name for name, _ in TextCorpus(heldout_percent=percent).documents("heldout")}
        for percent in (10, 37, 100)
    }
    assert names[10] < names[37] < names[100]


def test_fingerprint_is_of_the_text_not_of_its_place(folder, tmp_path):
    corpus = TextCorpus(f"{folder}/one.txt")
    (folder / "below" / "one.txt").write_bytes((folder / "one.txt").read_bytes())
    assert TextCorpus(f"{folder}/below/one.txt").fingerprint() == corpus.fingerprint()
    others = [
        TextCorpus(),
        TextCorpus(f"{folder}/below/two.txt"),
        TextCorpus(f"{folder}/one.txt", heldout_percent=11),
    ]
    with open(folder / "one.txt", "rb+") as file:
        file.seek(-1, os.SEEK_END)  # The last byte alone.
        file.write(b"!")
    others.append(TextCorpus(f"{folder}/one.txt"))
    assert all(other.fingerprint() != corpus.fingerprint() for other in others)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("absent.txt", ["absent.txt", "matches nothing"]),
        ("*.txt,*.nothing", ["*.nothing", "matches nothing"]),
        ("below", ["below", "only a directory", "below/**/*.txt"]),
        ("**", ["empty", "remove it"]),
        ("empty", ["empty", "remove it"]),
        (" , ", ["expected a path or a glob"]),
    ],
)
def test_bad_files_are_named_in_one_paragraph(folder, monkeypatch, files, words):
    monkeypatch.chdir(folder)
    (folder / "empty").touch()
    with pytest.raises(ConfigError) as error:
        TextCorpus(files).documents("train")
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_empty_split_and_bad_settings_are_refused(tmp_path):
    (tmp_path / "short.txt").write_text("Only one block.\n")
    corpus = TextCorpus(str(tmp_path / "short.txt"), heldout_percent=0)
    assert corpus.num_bytes("train") == 16
    with pytest.raises(ConfigError, match=r"'heldout'.*short\.txt'.* 0, .*1"):
        corpus.tokens("heldout")
    with pytest.raises(ConfigError, match="'train'"):
        TextCorpus(heldout_percent=100).tokens("train")
    with pytest.raises(ConfigError, match=r"'held_out'.*heldout\?"):
        TextCorpus().tokens("held_out")
    for percent in -1, 101, 0.1, "ten":
        with pytest.raises(ConfigError, match="heldout_percent"):
            TextCorpus(heldout_percent=percent).tokens("train")


def test_tokens_that_are_no_text_are_numbers():
    assert TokenIds().decode([3, 17, 5]) == "3 17 5"
    assert TokenIds().encode("3 17 5").tolist() == [3, 17, 5]
    assert TokenIds().encode("").dtype == np.int32
    # Nothing stands before a prompt: no vocabulary has the end of a text.
    assert TokenIds().encode_prompt("3 17 5").tolist() == [3, 17, 5]
