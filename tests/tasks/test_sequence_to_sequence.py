"""The sequence-to-sequence task: its metrics by hand, what it decodes, what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, NnxModel
from praxis_lite.decode import BeamSearch, Greedy
from praxis_lite.experiments.seq2seq import END, ReversedWords
from praxis_lite.inputs.tokenizers import load_tokenizer
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask
from praxis_tools.check.asserts.layers import drawn
from tests.support.goldens import GOLDENS

BATCH = {
    "src_ids": np.zeros((3, 2), np.int32),
    "src_paddings": np.zeros((3, 2), np.float32),
    "ids": np.zeros((3, 4), np.int32),
    "labels": np.asarray([[5, 6, 1, 0], [7, 1, 0, 0], [0, 0, 0, 0]], np.int32),
    "weights": np.asarray([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], np.float32),
}


def task(**options):
    return SequenceToSequenceTask(lambda rngs: None, Learner(optax.sgd, 0.1), **options)


class Model:
    """Predicts the first row but its padding, and one of two tokens of the second."""

    def compute_loss(self, inputs, targets, labels, weights, *, input_paddings, key, **given):
        assert set(given) == {"target_paddings"}
        return {
            "per_example_argmax": jnp.asarray([[5, 6, 1, 9], [7, 2, 0, 0], [3, 3, 3, 3]]),
            "total_loss": jnp.float32(1.5),
            "accuracy": jnp.float32(0.8),
            "total_weight": 5.0,
        }


def test_an_exact_match_is_a_row_whose_every_weighted_token_is_right(monkeypatch):
    monkeypatch.setattr("praxis_lite.tasks.sequence_to_sequence.aux_loss", lambda model: None)
    metrics = task().compute_loss(Model(), {**BATCH, "paddings": BATCH["src_paddings"]}, None)
    assert {name: tuple(map(float, pair)) for name, pair in metrics.items()} == {
        "loss": (1.5, 5.0),
        "accuracy": (pytest.approx(0.8), 5.0),
        "exact_match": (0.5, 2.0),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "optional",
    [
        ("paddings",),
        pytest.param(("src_segment_ids", "segment_ids"), marks=pytest.mark.nightly),
    ],
)
def test_filler_rows_enter_no_loss_of_experts_and_take_no_places(optional):
    """Neither in the encoder nor in the decoder, whatever is in them."""
    experts = functools.partial(
        layers.TransformerFeedForwardMoe,
        num_experts=3,
        num_groups=1,
        unadjusted_expert_capacity_factor=0.0,
        expert_capacity_dim=4,
        moe_router_z_loss_weight=0.1,
    )
    block = functools.partial(layers.Transformer, tr_fflayer_tpl=experts)
    model = NnxModel(
        functools.partial(
            layers.TransformerEncoderDecoder,
            7,
            6,
            8,
            2,
            1,
            1,
            encoder_layer_tpl=block,
            decoder_layer_tpl=block,
        )
    )
    mdl_vars = drawn(model)
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 7, (3, 2, 5)).astype(np.int32)
    batch = dict(zip(("src_ids", "ids", "labels"), ids, strict=True))
    batch |= {"weights": np.ones((2, 5), np.float32), "src_paddings": np.zeros((2, 5), np.float32)}
    batch["src_paddings"][1, 4] = 1.0  # A true row's padding stays as it is.
    values = {"paddings": batch["src_paddings"]} | dict.fromkeys(
        ("src_segment_ids", "segment_ids"), np.ones((2, 5), np.int32)
    )
    batch |= {name: values[name] for name in optional}

    def padded(value):
        # First, where their tokens would be served first.
        fill = {"weights": 0, "src_paddings": 0, "paddings": 0}
        return {
            name: np.concatenate([np.full((2, 5), fill.get(name, value), x.dtype), x])
            for name, x in batch.items()
        }

    @jax.jit
    def metrics_of(batch):
        return task().compute_loss(model.module(mdl_vars), batch, None)

    expected, *actual = map(metrics_of, (batch, padded(0), padded(1)))
    assert "aux_loss" in expected
    for item in actual:
        for name, pair in expected.items():
            np.testing.assert_allclose(item[name], pair, rtol=2e-6, err_msg=name)


def test_records_of_true_rows_say_whether_the_target_was_found():
    inputs = {
        "src_ids": np.asarray([[6, 5, 0], [7, 7, 7]]),
        "labels": np.asarray([[5, 6, 1, 0]] * 2),
        "src_paddings": np.asarray([[0, 0, 1], [0, 0, 0]]),
        "weights": np.asarray([1.0, 0.0]),
    }
    outputs = {
        "output_ids": np.asarray([[[5, 6, 1], [5, 1, 0]]] * 2),
        "decode_lengths": np.asarray([[3, 2]] * 2),
        "logprobs": np.full((2, 2, 3), -0.5),
        "scores": np.asarray([[-1.0, -2.0]] * 2),
    }
    decoder = BeamSearch(beam_size=2, eos_id=END)
    assert task(decoder=decoder).decode_to_records(inputs, outputs) == [
        {
            "source_ids": [6, 5],
            "output_ids": [5, 6, 1],
            "log_prob": -1.5,
            "target_ids": [5, 6, 1],
            "is_match": True,
            "sample": 0,
            "score": -1.0,
        },
        {
            "source_ids": [6, 5],
            "output_ids": [5, 1],
            "log_prob": -1.0,
            "target_ids": [5, 6, 1],
            "is_match": False,
            "sample": 1,
            "score": -2.0,
        },
    ]


def test_an_output_ends_before_its_stop_string_and_has_no_special_tokens():
    tokenizer = load_tokenizer(GOLDENS / "tokenizers" / "llama3")
    stopped = tokenizer.encode("one; the", False).tolist()  # "; " is a part of two tokens.
    ended = [*tokenizer.encode("three", False).tolist(), tokenizer.eos_id]
    after = len(stopped) + 1
    output_ids = np.zeros((2, 1, 9), np.int32)
    output_ids[0, 0, :after], output_ids[1, 0, : len(ended)] = [*stopped, stopped[0]], ended
    inputs = {
        "src_ids": np.ones((2, 1), np.int32),
        "src_paddings": np.zeros((2, 1)),
        "ids": np.full((2, 1), tokenizer.bos_id),
        "prefix_lengths": np.ones(2, np.int32),
        "weights": np.ones(2),
    }
    outputs = {
        "output_ids": output_ids,
        "decode_lengths": np.asarray([[after], [len(ended)]]),
        "logprobs": np.where(output_ids > 0, -0.5, 0.0),
    }
    decoder = Greedy(stop_strings=("; ",))
    records = task(tokenizer=tokenizer, decoder=decoder).decode_to_records(inputs, outputs)
    assert [record["output"] for record in records] == ["one", "three"]
    assert [record["output_ids"] for record in records] == [stopped, ended]
    assert [record["log_prob"] for record in records] == [-0.5 * len(stopped), -0.5 * len(ended)]
    with pytest.raises(ConfigError, match="stop_strings is .*'; '.*tokenizer"):
        task(decoder=decoder)


def test_places_shared_by_rows_of_other_sources_are_refused():
    for name in ("num_cache_slots", "num_cached_prefixes"):
        with pytest.raises(ConfigError, match=f"{name} is 3.*0"):
            task(decoder=Greedy(**{name: 3}))


def test_a_made_up_word_is_followed_by_itself_backwards():
    pipeline = ReversedWords(num_letters=5, max_letters=7, batch_size=11, seed=3)
    pipeline.check()
    spec, batch = pipeline.element_spec(), pipeline.rows(2, slice(0, 11))
    assert {name: x.shape for name, x in spec.items()} == {n: x.shape for n, x in batch.items()}
    lengths = (1 - batch["src_paddings"]).sum(axis=1).astype(int)
    assert lengths.min() >= 3 and lengths.max() <= 7 and len(set(lengths)) > 1
    for row, length in enumerate(lengths):
        word = batch["src_ids"][row, :length].tolist()
        assert batch["labels"][row, : length + 1].tolist() == [*word[::-1], END]
        assert batch["ids"][row, : length + 1].tolist() == [END, *word[::-1]]
        assert batch["weights"][row].tolist() == [1.0] * (length + 1) + [0.0] * (7 - length)
    # A host draws its own rows alone, and the same.
    part = pipeline.rows(2, slice(4, 9))
    jax.tree.map(np.testing.assert_array_equal, part, {n: x[4:9] for n, x in batch.items()})
    prompts = ReversedWords(5, 7, 11, seed=3, for_decoding=True).rows(2, slice(0, 11))
    assert prompts["ids"].tolist() == [[END]] * 11
    np.testing.assert_array_equal(prompts["labels"], batch["labels"])
