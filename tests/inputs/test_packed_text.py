"""Documents of JSON lines, packed: every token where a plain reading of the files puts it."""

import functools
import itertools
import json
import logging
import os
import types

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import Documents, JsonLines, Mixture, PackedText, TokenIds, WithWorkers
from praxis_lite.inputs.base import batches_sha256
from praxis_lite.inputs.processes import all_cores
from praxis_lite.inputs.sources import base as sources_base
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.text import packed_text
from praxis_lite.trainer.checks.job_checks import check_tokens

T = 37
EOS = 256


def text_of(number):
    return f"{number} " * (1 + number * 7 % 29)


def is_even(example):
    return example["n"] % 2 == 0


def without_return(example):
    example["text"] = "T" + example["text"]


def with_title(example):
    return {**example, "text": "T" + example["text"]}


def fails(example):
    raise RuntimeError("of the user")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of 60 lines."""
    folder = tmp_path_factory.mktemp("packed")
    for file in range(2):
        lines = [{"text": text_of(n), "n": n} for n in range(60 * file, 60 * file + 60)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def documents(folder, **settings):
    return Documents(JsonLines(f"{folder}/*.jsonl"), **settings)


def packed(folder, of=None, **settings):
    settings = {"split": "train", "batch_size": 4, "seq_len": T, "shuffle": False} | settings
    return PackedText(documents(folder, **(of or {})), **settings)


def pieces_of(pipeline):
    """Returns the (ids, labels, weights) of each segment of one pass, and checks the rest."""
    actual, num_rows = [], pipeline.table.num_rows
    for batch in itertools.islice(pipeline.batches(), -(-num_rows // pipeline.batch_size)):
        for row in range(len(batch["ids"])):
            segments = batch["segment_ids"][row]
            assert not any(batch[name][row][segments == 0].any() for name in batch)
            for item in range(1, segments.max() + 1):
                (here,) = np.nonzero(segments == item)
                assert (np.diff(here) == 1).all()
                assert batch["segment_pos"][row][here].tolist() == list(range(len(here)))
                actual.append(
                    tuple(batch[name][row][here].tolist() for name in ("ids", "labels", "weights"))
                )
    return actual


def stream_of(text):
    return [EOS, *text.encode(), EOS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": False},
        {"shuffle": True},
        {"split_documents": True},
        {"split_documents": True, "shuffle": True},
        {"window": 1},
    ],
)
@pytest.mark.parametrize("cache_tokens", [True, False])
def test_one_pass_has_every_label_of_every_document_once(folder, settings, cache_tokens):
    # A batch of one row: an epoch that is shuffled ends with a row, not with a batch.
    pieces = pieces_of(packed(folder, {"cache_tokens": cache_tokens}, batch_size=1, **settings))
    expected = [stream_of(text_of(n)) for n in range(120)]
    # Each piece is a run of a document, its labels the ids after its ids.
    for ids, labels, weights in pieces:
        assert ids[1:] == labels[:-1] and weights == [1] * len(ids)
    labels = sorted(itertools.chain(*(labels for _, labels, _ in pieces)))
    assert labels == sorted(itertools.chain(*(item[1:] for item in expected)))
    if not settings.get("split_documents"):
        begun = sorted(ids[:T] for ids, _, _ in pieces if ids[0] == EOS)
        assert begun == sorted(element[:-1][:T] for element in expected)


def test_documents_are_found_ahead_and_on_the_fly_as_the_same(folder):
    settings = {"seed": 5, "shuffle": True, "window": 8}
    ahead, later = (packed(folder, {"cache_tokens": x}, **settings) for x in (True, False))
    assert batches_sha256(itertools.islice(ahead.batches(), 30)) == batches_sha256(
        itertools.islice(later.batches(), 30)
    )
    assert ahead.fingerprint() == later.fingerprint()


def test_filter_and_transform_and_splits(folder):
    of = {"keep": is_even, "transform": with_title, "heldout_percent": 20}
    train, heldout = (
        packed(folder, of, split=x, packing=False, seq_len=999) for x in ("train", "heldout")
    )
    both = [[bytes(ids[1:]).decode() for ids, _, _ in pieces_of(item)] for item in (train, heldout)]
    assert sorted(both[0] + both[1]) == sorted("T" + text_of(n) for n in range(0, 120, 2))
    assert 3 <= len(both[1]) <= 25 and train.documents.left_out == {"filtered": 60}
    # Its content decides, so the same text is held out wherever it stands.
    assert [x for x in both[0] if x in both[1]] == []


def test_a_transform_that_returns_nothing_is_named_with_its_example(folder):
    with pytest.raises(ConfigError, match=r"transform for .*0.jsonl:1 is None"):
        packed(folder, {"transform": without_return}).check()


def test_too_long(folder):
    with pytest.raises(ConfigError, match=r"0.jsonl:4.*46.*seq_len.*1.*=.*38"):
        packed(folder, too_long="refuse").check()
    long = [n for n in range(120) if len(text_of(n)) + 1 > T]
    assert packed(folder, too_long="drop", packing=False).table.num_rows == 120 - len(long)
    cut = pieces_of(packed(folder, too_long="cut"))
    assert sorted(map(len, (ids for ids, _, _ in cut))) == sorted(
        min(T, len(text_of(n)) + 1) for n in range(120)
    )


@pytest.mark.parametrize(
    ("too_long", "reported", "num_learned"),
    [
        ("cut", "longer than a row: 2 cut, 1 of them before the first answer", 2 + 9),
        ("drop", "longer than a row: 2 dropped", 2),
        ("split", "longer than a row: 2 split", 2 + 2 + 51),
    ],
)
def test_the_log_reports_conversations_that_lose_their_answers(
    tmp_path, caplog, too_long, reported, num_learned
):
    rows = [
        {"prompt": "question " * question, "completion": "a" * answer}
        for question, answer in ((1, 1), (5, 1), (3, 50))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    caplog.set_level(logging.INFO)
    result = packed(
        tmp_path, {"format": "completion"}, seq_len=36, too_long=too_long, packing=False
    )
    learned = sum(batch["weights"].sum() for batch in result.batches())
    assert learned == num_learned and reported in caplog.text


def test_answers_alone_are_learned(tmp_path):
    chat = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]}
    task = {"prompt": "2+2=", "completion": "4"}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat | task) + "\n")
    for holds, learned, others in (
        ("messages", b"c\x03", task),
        ("completion", b"4", chat),
    ):
        rows = packed(tmp_path, {"format": holds, "ignored_keys": tuple(others)})
        ((_, labels, weights),) = pieces_of(rows)
        actual = [x for x, weight in zip(labels, weights, strict=True) if weight]
        assert bytes(x for x in actual if x != EOS) == learned
        assert rows.tokens_per_row() == len(actual) == sum(weights)
        assert (actual[-1] == EOS) == (holds == "completion")


def test_the_mean_of_tokens_is_that_of_an_epoch(folder):
    rows = packed(folder, shuffle=True)
    num_rows = rows.table.num_rows
    batches = itertools.islice(packed(folder, shuffle=True, batch_size=1).batches(), num_rows)
    assert rows.tokens_per_row() == sum(b["weights"].sum() for b in batches) / num_rows


def test_ids_of_others_are_checked(tmp_path, caplog):
    lines = [{"ids": [3, 4, 5]}, {"ids": [1]}, {"ids": [7, -1, 2]}, {"ids": [0, 6]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    with pytest.raises(ConfigError, match=r"a.jsonl:3.*-1.*0"):
        packed(tmp_path, {"format": "ids"}).check()
    source = JsonLines(f"{tmp_path}/*.jsonl", skip=["id_beyond_vocabulary"])
    actual = PackedText(Documents(source, "ids"), "train", 1, 3, shuffle=False)
    with caplog.at_level(logging.INFO):
        assert [ids for ids, _, _ in pieces_of(actual)] == [[3, 4], [0]]
        assert actual.documents.left_out == {"id_beyond_vocabulary": 1, "too_short": 1}
    assert f"{tmp_path}/*.jsonl: skipped examples: 1 (id_beyond_vocabulary), 1 (too" in caplog.text
    assert actual.documents.largest_id() == (6, f"{tmp_path}/a.jsonl:4")


def test_tokens_are_made_once_and_of_changed_files_again(folder, tmp_path, monkeypatch):
    for path in folder.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    made = []
    original = Documents._encode_part
    monkeypatch.setattr(
        Documents,
        "_encode_part",
        lambda self, part: (made.append(part.name.split(".")[0]), original(self, part))[1],
    )
    first = packed(tmp_path).fingerprint()
    assert made == ["0", "1"]
    assert packed(tmp_path).fingerprint() == first and made == ["0", "1"]
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    second = packed(tmp_path).fingerprint()
    assert made == ["0", "1", "1"]
    old, new = (item["documents"]["source"]["files"] for item in (first, second))
    assert old["0.jsonl"] == new["0.jsonl"] and old["1.jsonl"] != new["1.jsonl"]


def test_what_was_made_before_an_error_is_not_made_again(folder, tmp_path, monkeypatch):
    for path in folder.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "1.jsonl").read_bytes()
    (tmp_path / "1.jsonl").write_bytes(whole + b'{"t": 1}\n')
    with pytest.raises(ConfigError, match="1.jsonl:61.*'text'"):
        packed(tmp_path).check()
    (tmp_path / "1.jsonl").write_bytes(whole)
    expected = packed(folder).fingerprint()
    result, original = [], Documents._encode_part
    monkeypatch.setattr(
        Documents,
        "_encode_part",
        lambda self, part: (result.append(part.name.split(".")[0]), original(self, part))[1],
    )
    assert packed(tmp_path).fingerprint() == expected and result == ["1"]


@pytest.mark.slow
def test_processes_on_all_cores_make_what_one_does(folder, tmp_path, monkeypatch):
    for path in folder.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(all_cores, "_MIN_EXAMPLES_FOR_PROCESSES", 0)
    first, second = packed(folder), packed(tmp_path)
    assert first.fingerprint() == second.fingerprint()
    result = sorted((tmp_path / ".praxis_lite").glob("tokens-*/*/*.npy"))
    assert len(result) == 8
    for path in result:  # NAME.DIGEST.TIME.START/ARRAY.npy: the files' times differ.
        file, digest, _, start = path.parent.name.rsplit(".", 3)
        names = f".praxis_lite/{path.parts[-3]}/{file}.{digest}.*.{start}/{path.name}"
        others = folder.glob(names)
        assert [path.read_bytes()] == [other.read_bytes() for other in others]
    (tmp_path / "1.jsonl").write_bytes(b'{"t": 1}\n')
    with pytest.raises(BadExample, match="1.jsonl:1.*'text'") as error:
        packed(tmp_path).check()
    assert error.value.fault == "missing_key"


def test_an_id_that_the_model_does_not_have_is_named_with_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ids": [3, 4]}\n{"ids": [1, 9]}\n')
    rows = packed(tmp_path, {"format": "ids"})
    mixture = Mixture({"one": rows, "two": rows}, {"one": 1, "two": 2}, 4)
    task = types.SimpleNamespace(tokenizer=TokenIds(), num_ids=lambda: {"ids": 9})
    with pytest.raises(ConfigError, match=r"sources.one.*a.jsonl:2.*9"):
        check_tokens(task, mixture, "datasets.train")
    task.num_ids = lambda: {"ids": 10}
    check_tokens(task, mixture, "datasets.train")


def test_rows_are_packed_once_for_all_processes(folder, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes((folder / "0.jsonl").read_bytes())
    calls, original = [], packed_text.first_fit
    monkeypatch.setattr(packed_text, "first_fit", lambda *args: calls.append(1) or original(*args))
    settings = [{}, {}, {"batch_size": 7}, {"seed": 1, "shuffle": True}, {"window": 2}]
    actual = [packed(tmp_path, **setting).table for setting in settings]
    assert len(calls) == 3
    for item, other in itertools.product(actual[:3], actual[:3]):
        assert all((x == y).all() for x, y in zip(item, other, strict=True))


def test_a_file_of_the_same_digest_and_another_time_is_tokenised_again(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(sources_base, "file_digest", lambda path, most: "0" * 32)
    for text in ("one", "two"):
        path.write_text(json.dumps({"text": text}))
        os.utime(path, ns=(0, len(text) + ord(text[0])))
        ((ids, _, _),) = pieces_of(packed(tmp_path))
        assert bytes(ids[1:]).decode() == text


BAD = {
    '{"txt": "a"}': r"a.jsonl:2.*'text'.*\['txt'\].*txt\?",
    '{"text": 3}': "a.jsonl:2.*3.*'text'",
    '["text"]': r'a.jsonl:2.*\["text"\];',
    '{"text": ': "a.jsonl:2.*JSON",
}


@pytest.mark.parametrize("line", BAD)
def test_what_is_wrong_with_a_line_is_told_with_its_place_or_skipped(tmp_path, line):
    good = json.dumps({"text": "good"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ConfigError, match=BAD[line]) as error:
        packed(tmp_path).check()
    source = JsonLines(f"{tmp_path}/a.jsonl", skip=[error.value.fault])
    actual = PackedText(Documents(source), "train", 1, T, shuffle=False)
    assert len(pieces_of(actual)) == 2 and actual.documents.left_out == {error.value.fault: 1}


def test_an_empty_split_and_an_empty_source(folder, tmp_path):
    with pytest.raises(ConfigError, match="'heldout'.*120"):
        packed(folder, split="heldout").check()
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"\(1 files"):
        mixture = Mixture(
            {"some": packed(folder, shuffle=True), "none": packed(tmp_path, shuffle=True)},
            {"some": 1, "none": 1},
            4,
        )
        mixture.check()


def test_an_error_of_the_users_function_names_the_example(folder):
    with pytest.raises(RuntimeError, match="of the user") as error:
        packed(folder, {"keep": fails}).check()
    assert "0.jsonl:1" in error.value.__notes__[0]


def stream(folder, **settings):
    """Shuffled, filtered, packed and mixed, with a change of weights."""
    rows = functools.partial(packed, folder, shuffle=True, batch_size=5)
    sources = {
        "even": rows({"keep": is_even}, seed=1),
        "all": rows(split_documents=True, seed=2),
        "later": rows({"cache_tokens": False, "transform": with_title}, seed=3, packing=False),
    }
    return Mixture(
        sources,
        [(0, {"even": 0.5, "all": 0.3, "later": 0.2}), (9, {"even": 0.1, "all": 0, "later": 0.9})],
        12,
        **settings,
    )


def test_the_stream_is_the_same_through_twenty_switches_of_hosts_and_workers(folder):
    rng = np.random.default_rng(11)
    whole = list(itertools.islice(stream(folder).batches(), 40))
    for index in range(0, 40, 2):  # Each switch: another number of hosts, workers and prefetch.
        hosts = int(rng.integers(1, 9))
        edges = np.linspace(0, 12, hosts + 1).astype(int)
        pipeline = stream(folder)
        if index % 4:
            pipeline = WithWorkers(
                pipeline, int(rng.integers(1, 4)), int(rng.integers(1, 4)), "threads"
            )
        parts = [
            itertools.islice(pipeline.batches(index, rows=slice(int(a), int(b))), 2)
            for a, b in itertools.pairwise(edges)
        ]
        for k, result in enumerate(zip(*parts, strict=True)):
            joined = {name: np.concatenate([x[name] for x in result]) for name in result[0]}
            assert batches_sha256([joined]) == batches_sha256([whole[index + k]])


def test_each_host_reads_only_its_rows(folder, monkeypatch):
    rows = packed(folder, {"cache_tokens": False}, shuffle=True, packing=False, seq_len=400)
    rows.check()
    read, original = [], JsonLines.example
    monkeypatch.setattr(
        JsonLines,
        "example",
        lambda self, record, where: (read.append(where), original(self, record, where))[1],
    )
    for host in range(4):
        rows.rows(3, slice(host, host + 1))
    # A row is one document here: a host reads one line, and all of them what the batch has.
    of_hosts = list(read)
    read.clear()
    rows.rows(3, slice(0, 4))
    assert read == of_hosts and len(set(read)) == 4
