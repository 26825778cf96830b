"""Pipelines without tensorflow: the contract of InputPipeline, held by each of them."""

import itertools
import json
import math

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.inputs import ByteTokenizer, InMemory, SyntheticLm, TextCorpus, TextPrompts
from praxis_lite.inputs.numpy_data import TextWindows

CORPUS = TextCorpus()
ARRAYS = {
    "inputs": np.arange(37 * 3, dtype=np.float64).reshape(37, 3) + 1,
    "labels": np.arange(37) + 1,
}


def train_windows(**changes):
    settings = {"batch_size": 6, "seq_len": 257, "seed": 3, "shuffle": True} | changes
    return TextWindows(CORPUS, "train", **settings)


def heldout_windows(**changes):
    settings = {"batch_size": 6, "seq_len": 257, "shuffle": False} | changes
    return TextWindows(CORPUS, "heldout", **settings)


def prompts(**changes):
    settings = {"batch_size": 6, "num_prompts": 7, "min_prompt_bytes": 11, "max_prompt_bytes": 53}
    return TextPrompts(CORPUS, "heldout", **(settings | changes))


def synthetic(**changes):
    return SyntheticLm(**({"vocab_size": 37, "batch_size": 6, "seq_len": 13} | changes))


def in_memory(**changes):
    return InMemory(ARRAYS, **({"batch_size": 6, "seed": 3, "shuffle": True} | changes))


PIPELINES = {
    "train windows": train_windows,
    "heldout windows": heldout_windows,
    "overlapping windows": lambda **changes: heldout_windows(stride=101, **changes),
    "prompts": prompts,
    "synthetic": synthetic,
    "synthetic, one pass": lambda **changes: synthetic(num_batches=5, **changes),
    "in memory": in_memory,
    "in memory, one pass": lambda **changes: in_memory(shuffle=False, **changes),
}


@pytest.fixture(params=PIPELINES.values(), ids=PIPELINES)
def make(request):
    return request.param


def taken(batches, count=23):
    return list(itertools.islice(batches, count))


def assert_same(batches, others):
    assert len(batches) == len(others) > 0
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def test_resuming_equals_skipping(make):
    for start in 1, 3:
        if make().num_batches is None or start < make().num_batches:
            assert_same(taken(make().batches())[start:], taken(make().batches(start), 23 - start))


@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 2, 4, 6), (0, 1, 6, 6)])
def test_rows_of_all_hosts_are_the_global_batch(make, bounds):
    whole = taken(make().batches(1))
    if whole:
        of_hosts = [
            taken(make().batches(1, rows=slice(*pair))) for pair in itertools.pairwise(bounds)
        ]
        joined = [
            {name: np.concatenate([rows[name] for rows in hosts]) for name in hosts[0]}
            for hosts in zip(*of_hosts, strict=True)
        ]
        assert_same(whole, joined)


def test_every_batch_has_the_shapes_of_element_spec(make):
    spec = make().element_spec()
    batches = taken(make().batches())
    assert make().num_batches in (None, len(batches)) or len(batches) == 23
    for batch in batches:
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in spec.items()
        }


def test_batches_end_after_num_batches(make):
    if make().num_batches is not None:
        assert len(list(make().batches(1))) == make().num_batches - 1
        assert not list(make().batches(make().num_batches))


def test_fingerprint_is_json_and_follows_the_settings(make):
    fingerprint = make().fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint == make().fingerprint()
    assert make(seed=4).fingerprint() != fingerprint
    assert make(batch_size=7).fingerprint() != fingerprint


def test_the_librarys_pipelines_are_deterministic(make):
    assert make().nondeterminism() is None


class Noisy(InMemory):
    """Rows with noise that no seed decides."""

    def rows(self, index, rows):
        batch = super().rows(index, rows)
        return batch | {"inputs": batch["inputs"] + np.random.normal(size=batch["inputs"].shape)}


def test_a_pipeline_that_draws_without_its_seed_is_found():
    noisy = Noisy(ARRAYS, 6, shuffle=True)
    assert noisy.nondeterminism() == "two computations of the first batch differ in 'inputs'"
    # A subclass may make other batches of the same settings: it is no InMemory to a checkpoint.
    assert noisy.fingerprint()["pipeline"] == f"{__name__}.Noisy"
    assert InMemory(ARRAYS, 6, shuffle=True).fingerprint()["pipeline"] == "InMemory"


def test_another_seed_and_another_step_give_other_batches(make):
    if make().num_batches is None:
        batches = taken(make().batches(), 13) + taken(make(seed=4).batches(), 13)
        assert len({str([leaf.tolist() for leaf in batch.values()]) for batch in batches}) == 26


def test_fingerprint_follows_the_text_and_the_arrays():
    other = TextCorpus(heldout_percent=20)
    settings = {"batch_size": 6, "seq_len": 257, "shuffle": True}
    with_other = TextWindows(other, "train", **settings).fingerprint()
    assert TextWindows(CORPUS, "train", **settings).fingerprint() != with_other
    arrays = ARRAYS | {"labels": ARRAYS["labels"] + 1}
    fingerprints = [
        InMemory(leaves, 6, shuffle=False).fingerprint()
        for leaves in (ARRAYS, arrays, {"x": ARRAYS["inputs"]})
    ]
    assert len(set(map(str, fingerprints))) == 3


@pytest.mark.parametrize("stride", [None, 1013, 101])
def test_heldout_text_is_scored_once_and_predicts_the_next_token(stride):
    """The weighted labels, in order, are the whole stream; each id stands before its label."""
    pipeline = heldout_windows(seq_len=1013, stride=stride)
    stream = CORPUS.tokens("heldout")
    labels, ids = [], []
    for batch in pipeline.batches():
        scored = batch["weights"] == 1
        labels.append(batch["labels"][scored])
        ids.append(batch["ids"][scored])
        assert not np.any(batch["ids"][np.all(batch["weights"] == 0, axis=1)])
    np.testing.assert_array_equal(np.concatenate(labels), stream[1:])
    np.testing.assert_array_equal(np.concatenate(ids), stream[:-1])
    assert len(stream) - 1 == CORPUS.num_bytes("heldout") + len(CORPUS.documents("heldout"))


def test_training_batches_are_pieces_of_the_text():
    stream = CORPUS.tokens("train")
    text = np.concatenate([stream[:-1], stream]).astype(np.uint16).tobytes()
    for batch in taken(train_windows().batches(1000), 5):
        assert np.all(batch["weights"] == 1)
        for ids, labels in zip(batch["ids"], batch["labels"], strict=True):
            window = np.append(ids, labels[-1]).astype(np.uint16).tobytes()
            assert text.find(window) % 2 == 0
            np.testing.assert_array_equal(ids[1:], labels[:-1])


def test_prompts_begin_documents_of_their_own():
    documents = [text for _, text in CORPUS.documents("heldout")]
    first, second = prompts().batches()
    np.testing.assert_array_equal(first["weights"], [1] * 6)
    np.testing.assert_array_equal(second["weights"], [1] + [0] * 5)
    assert not np.any(second["ids"][1:]) and not np.any(second["prefix_lengths"][1:])

    begun = set()
    for batch in first, second:
        for ids, length in zip(batch["ids"], batch["prefix_lengths"], strict=True):
            if length:
                assert ids[0] == ByteTokenizer.eos_id and 11 <= length - 1 <= 53
                assert not np.any(ids[length:])
                prompt = ByteTokenizer().decode(ids[1:length]).encode()
                (document,) = [d for d in documents if d.startswith(prompt)]
                assert len(prompt) == length - 1 < len(document)
                begun.add(document)
    assert len(begun) == 7
    assert len(set(first["prefix_lengths"])) > 1, "the prompts are not ragged"


def test_a_prompt_leaves_something_of_a_short_document():
    shortest = min((text for _, text in CORPUS.documents("heldout")), key=len)
    one_less = len(shortest) - 1
    settings = {"batch_size": 10, "num_prompts": 10, "max_prompt_bytes": one_less + 13}
    (batch,) = prompts(min_prompt_bytes=one_less, **settings).batches()
    (row,) = np.flatnonzero(
        np.all(batch["ids"][:, 1 : one_less + 1] == list(shortest[:-1]), axis=1)
    )
    assert batch["prefix_lengths"][row] - 1 == one_less


def test_in_memory_epochs_are_permutations():
    labels = np.concatenate([b["labels"] for b in taken(in_memory(batch_size=37).batches(), 5)])
    epochs = labels.reshape(5, 37)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(37) + 1, (5, 1)))
    assert len(set(map(tuple, epochs.tolist()))) == 5
    batch = next(in_memory().batches())
    np.testing.assert_array_equal(batch["inputs"], ARRAYS["inputs"][batch["labels"] - 1])


def test_in_memory_pass_is_in_order_and_filled_with_zero_rows():
    batches = list(in_memory(shuffle=False).batches())
    assert len(batches) == 7
    for name, values in ARRAYS.items():
        got = np.concatenate([batch[name] for batch in batches])
        np.testing.assert_array_equal(got[:37], values)
        assert not np.any(got[37:])
    np.testing.assert_array_equal(batches[-1]["weights"], [1, 0, 0, 0, 0, 0])
    assert batches[0]["inputs"].dtype == np.float32 and batches[0]["labels"].dtype == np.int32


def test_in_memory_weights_are_the_users_or_one_per_label():
    weights = np.linspace(0, 1, 37)
    batch = next(InMemory(ARRAYS | {"weights": weights}, 37, shuffle=False).batches())
    np.testing.assert_array_equal(batch["weights"], weights.astype(np.float32))
    tokens = np.ones((5, 7), np.int32)
    pipeline = InMemory(lambda: {"ids": tokens, "labels": tokens}, 5, shuffle=False)
    assert next(pipeline.batches())["weights"].shape == (5, 7)


def test_synthetic_language_has_the_loss_that_its_docstring_says():
    vocab_size = 37
    batch = next(synthetic(batch_size=101, seq_len=1009).batches())
    assert batch["ids"].min() == 0 and batch["ids"].max() == vocab_size - 1
    np.testing.assert_array_equal(batch["ids"][:, 1:], batch["labels"][:, :-1])
    share = np.mean(batch["labels"] == (batch["ids"] + 1) % vocab_size)
    assert share == pytest.approx(7 / 8 + 1 / 8 / vocab_size, abs=0.005)
    entropy = -(share * math.log(share) + (1 - share) * math.log((1 - share) / (vocab_size - 1)))
    assert entropy == pytest.approx(0.38 + math.log(vocab_size) / 8, abs=0.03)


BAD_SETTINGS = [
    (lambda: train_windows(batch_size=0), "batch_size.*0"),
    (lambda: train_windows(seq_len=10**6), "seq_len.*1000000"),
    (lambda: train_windows(seed=-1), "seed.*-1"),
    (lambda: train_windows(stride=5), "stride=5 .*shuffle=True"),
    (lambda: heldout_windows(stride=258), "stride.*258.*seq_len.*257"),
    (lambda: TextWindows(CORPUS, "trian", 2, 7, shuffle=True), r"'trian'.*train\?"),
    (lambda: prompts(num_prompts=99), "99;.* 1[0-9].*11"),
    (lambda: prompts(max_prompt_bytes=7), "max_prompt_bytes.*7.*11"),
    (lambda: synthetic(num_batches=0), "num_batches.*0"),
    (lambda: InMemory({}, 2, shuffle=True), "arrays.*{}"),
    (lambda: InMemory({"a": np.ones((5, 2)), "b": np.ones(7)}, 2, shuffle=True), r"\(5, 2\), 'b"),
    (lambda: InMemory({"a": np.ones(3)}, 2, seed=-1, shuffle=True), "InMemory.seed.*-1"),
    (lambda: InMemory({"a": np.ones((0, 3))}, 2, shuffle=True), r"'a': \(0, 3\)"),
    (lambda: InMemory({"a": np.array(["x"])}, 2, shuffle=True), "'a' has the dtype <U1"),
    (lambda: InMemory({"a": np.array([2**31])}, 2, shuffle=True), "int32"),
]


@pytest.mark.parametrize(("make_bad", "words"), BAD_SETTINGS)
def test_bad_settings_are_refused_before_the_first_batch(make_bad, words):
    pipeline = make_bad()  # The constructor only keeps them.
    for refused in pipeline.check, pipeline.batches:
        with pytest.raises(ConfigError, match=words) as error:
            refused()
        assert "\n" not in str(error.value)
