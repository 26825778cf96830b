"""The language-model task against NumPy: loss, bits, accuracy; and what it writes of a decode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, WeightSharding
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.decode import Sample
from praxis_lite.inputs.tokenizers.plain import ByteTokenizer, TokenIds
from praxis_lite.layers import AuxLoss, BaseLayer, Summary
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask

RNG = np.random.default_rng(15)
LOGITS = RNG.normal(size=(3, 5, 7)).astype(np.float32)
BATCH = {
    "ids": np.zeros((3, 5), np.int32),
    "labels": RNG.integers(0, 7, (3, 5), dtype=np.int32),
    "weights": np.asarray([[1, 1, 1, 1, 1], [1, 1, 0.5, 0, 0], [0, 0, 0, 0, 0]], np.float32),
}


def task(**options) -> LanguageModelTask:
    return LanguageModelTask(lambda rngs: None, Learner(optax.sgd, 0.1), **options)


def metrics_of(batch, **options):
    model = lambda ids, key: (jnp.asarray(LOGITS), None)  # noqa: E731
    return jax.jit(lambda batch: task(**options).compute_loss(model, batch, None))(batch)


def test_loss_bits_and_accuracy_are_means_over_weighted_tokens():
    metrics, total, hits = metrics_of(BATCH), 0.0, 0.0
    for b in range(3):
        for t in range(5):
            row, label, w = (
                LOGITS[b, t].astype(np.float64),
                *(BATCH[k][b, t] for k in ("labels", "weights")),
            )
            total += w * (np.log(np.exp(row).sum()) - row[label])
            hits += w * (row.argmax() == label)
    num_tokens = BATCH["weights"].sum()
    assert num_tokens == 7.5
    expected = {
        "loss": total / num_tokens,
        "bits_per_byte": total / num_tokens / np.log(2),
        "accuracy": hits / num_tokens,
    }
    assert set(metrics) == set(expected)
    for name, (value, weight) in metrics.items():
        assert float(value) == pytest.approx(expected[name], rel=1e-6), name
        assert float(weight) == num_tokens


def test_bits_are_named_after_what_a_token_is():
    assert "bits_per_token" in metrics_of(BATCH, tokenizer=TokenIds())
    # Ids beyond the bytes, of which nobody said what they are.
    model = lambda ids, key: (jnp.asarray(LOGITS), None)  # noqa: E731
    for vocab_size, tokenizer, unit in (
        (257, None, "byte"),
        (300, None, "token"),
        (300, ByteTokenizer(), "byte"),
    ):
        model.vocab_size = vocab_size
        metrics = task(tokenizer=tokenizer).compute_loss(model, BATCH, None)
        assert f"bits_per_{unit}" in metrics


def test_the_loss_of_bfloat16_logits_is_computed_in_float32():
    """In bfloat16 it is 11.0625."""
    logits = np.zeros((1, 1, 37), np.float32)
    logits[0, 0, 1] = 11.0
    model = lambda ids, key: (jnp.asarray(logits, jnp.bfloat16), None)  # noqa: E731
    batch = {name: np.zeros((1, 1), np.int32) for name in ("ids", "labels")}
    batch["weights"] = np.ones((1, 1), np.float32)
    value, _ = task().compute_loss(model, batch, None)["loss"]
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(np.log(np.exp(11.0) + 36), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [0, 1])
def test_filler_rows_enter_neither_the_load_nor_the_losses_of_experts(num_groups):
    """Whatever is in them; and in one group they take no places from true tokens."""
    experts = functools.partial(
        layers.TransformerFeedForwardMoe,
        num_experts=3,
        num_groups=num_groups,
        unadjusted_expert_capacity_factor=0.0,
        expert_capacity_dim=4,
        moe_router_z_loss_weight=0.1,
    )
    model = layers.TransformerLm(
        7,
        6,
        8,
        2,
        1,
        transformer_layer_tpl=functools.partial(layers.Transformer, tr_fflayer_tpl=experts),
        rngs=nnx.Rngs(3),
    )
    ids = np.random.default_rng(2).integers(0, 7, (2, 6)).astype(np.int32)
    ids[1, :5] = ids[1, 0]  # So that the busiest expert is full.
    weights = np.ones((2, 5), np.float32)
    weights[0, :2] = 0.0  # A prompt: tokens like others.
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}

    def padded(value):
        # First, where their tokens would be served first.
        return {
            name: np.concatenate([np.full((2, 5), 0 if name == "weights" else value, x.dtype), x])
            for name, x in batch.items()
        }

    graph, state = nnx.split(model)

    @jax.jit
    def compute_loss(state, element):
        return task().compute_loss(nnx.merge(graph, state), element, None)

    expected, *actual = (compute_loss(state, one) for one in (batch, padded(0), padded(4)))
    assert {"aux_loss", "max_expert_load", "over_capacity_ratio"} < set(expected)
    assert expected["over_capacity_ratio"][0] > 0.05
    for item in actual:
        for name, pair in expected.items():
            np.testing.assert_allclose(item[name], pair, rtol=2e-6, err_msg=name)


def test_a_batch_of_filler_alone_weighs_nothing_and_is_finite():
    metrics = metrics_of({**BATCH, "weights": np.zeros((3, 5), np.float32)})
    assert {name: tuple(map(float, pair)) for name, pair in metrics.items()} == {
        "loss": (0.0, 0.0),
        "bits_per_byte": (0.0, 0.0),
        "accuracy": (0.0, 0.0),
    }


def test_records_hold_the_text_of_true_rows_only():
    eos = 256
    inputs = {
        "ids": np.asarray([[eos, *b"ab"], [eos, *b"x\0"], [0, 0, 0]], np.int32),
        "prefix_lengths": np.asarray([3, 2, 0]),
        "weights": np.asarray([1.0, 1.0, 0.0]),
    }
    outputs = {
        "output_ids": np.asarray([[*b"cd", eos, 0], [*b"wxyz"], [0, 0, 0, 0]], np.int32)[:, None],
        "decode_lengths": np.asarray([3, 4, 0])[:, None],
        "logprobs": np.asarray(
            [[-1, -0.25, -0.25, 0], [-0.5, -0.5, -0.5, -1], [0, 0, 0, 0]], np.float32
        )[:, None],
    }
    assert task(tokenizer=ByteTokenizer()).decode_to_records(inputs, outputs) == [
        {
            "prompt": "ab",
            "continuation": "cd",
            "prefix_length": 3,
            "decode_length": 3,
            "ended": True,
            "log_prob": -1.5,
            "output_ids": [99, 100, eos],
        },
        {
            "prompt": "x",
            "continuation": "wxyz",
            "prefix_length": 2,
            "decode_length": 4,
            "ended": False,
            "log_prob": -2.5,
            "output_ids": [119, 120, 121, 122],
        },
    ]


def test_a_missing_input_names_the_key_the_dataset_and_what_there_is():
    spec = {"ids": None, "label": None, "weights": None}
    lm = task()
    with pytest.raises(ConfigError, match=r"'labels'.*datasets\.train.*'label'"):
        lm.check_inputs(spec, lm.required_inputs, "datasets.train")


def test_each_hypothesis_has_a_record_and_its_text_ends_before_a_stop_string():
    inputs = {
        "ids": np.asarray([list(b"ab")]),
        "prefix_lengths": np.asarray([2]),
        "weights": np.asarray([1.0]),
    }
    outputs = {
        "output_ids": np.asarray([[[*b"c--d"], [*b"e-f", 256]]], np.int32),
        "decode_lengths": np.asarray([[4, 4]]),
        "logprobs": np.full((1, 2, 4), -0.5, np.float32),
        "scores": np.asarray([[-2.0, -2.5]], np.float32),
    }
    decoder = Sample(num_samples=2, stop_strings=("--",), max_decode_steps=4)
    lm = task(decoder=decoder, tokenizer=ByteTokenizer())
    assert lm.decoder.stop_sequences == ((45, 45),) and lm.decoder.eos_ids == (256, 3)
    first, second = lm.decode_to_records(inputs, outputs)
    assert (first["continuation"], first["sample"], first["score"]) == ("c", 0, -2.0)
    assert (first["output_ids"], first["decode_length"], first["log_prob"]) == ([*b"c--"], 3, -1.5)
    assert (second["continuation"], second["sample"], second["score"]) == ("e-f", 1, -2.5)
    assert first["ended"] and second["ended"]


class Model(nnx.Module):
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


@pytest.mark.parametrize(("vocab_size", "tokenizer", "expected"), [
    (257, None, (256, 3)), (300, None, (256,)), (300, ByteTokenizer(), (256, 3)),
])  # fmt: skip
def test_byte_3_ends_a_row_if_the_ids_are_bytes(vocab_size, tokenizer, expected):
    learner = Learner(optax.sgd, 0.1)
    lm = LanguageModelTask(lambda rngs: Model(vocab_size), learner, tokenizer=tokenizer)
    assert (lm.decoder.eos_ids, lm.decoder.stop_sequences) == (expected, ())


def test_a_task_that_does_not_decode_says_so():
    from praxis_lite.tasks.image_classification import ClassificationTask

    classifier = ClassificationTask(lambda rngs: None, Learner(functools.partial(optax.sgd), 0.1))
    with pytest.raises(ConfigError, match="ClassificationTask"):
        classifier.decode(None, {}, None)


class Reporting(BaseLayer):
    """A model with a loss of its own, whose layers add to it and report."""

    def __init__(self):
        self.first, self.second = (_Layer(weight) for weight in (1.0, 3.0))

    def compute_loss(self, ids, labels, weights, *, key=None, positions, segment_ids):
        assert positions is segment_ids
        for layer in (self.first, self.second):
            layer.router_loss.set_value(0.25 * layer.weight)
            layer.dropped.set_value(layer.weight)
        return {
            "total_loss": jnp.float32(2.0),
            "avg_xent": jnp.float32(1.0),
            "aux_loss": jnp.float32(1.0),
            "accuracy": jnp.float32(0.5),
            "total_weight": jnp.sum(weights),
        }


class _Layer(BaseLayer):
    def __init__(self, weight):
        self.weight = weight
        self.router_loss, self.dropped = AuxLoss(jnp.zeros(())), Summary(jnp.zeros((2,)))


def test_what_layers_add_to_the_loss_and_report_are_metrics_too():
    batch = {**BATCH, "segment_ids": BATCH["ids"], "segment_pos": BATCH["ids"], "other": None}
    metrics = task().compute_loss(Reporting(), batch, None)
    assert {name: float(value) for name, (value, _) in metrics.items()} == {
        # To be minimized is the loss with what the layers add; bits are of the text alone.
        "loss": 2.0,
        "bits_per_byte": pytest.approx(1.0 / np.log(2)),
        "accuracy": 0.5,
        "aux_loss": 1.0,
        "dropped": 2.0,
    }
    assert {float(weight) for _, weight in metrics.values()} == {7.5}


def test_packed_rows_are_refused_where_a_model_would_not_hear_of_segments():
    with pytest.raises(ConfigError, match="compute_loss"):
        metrics_of({**BATCH, "segment_ids": BATCH["ids"]})


@pytest.mark.parametrize("model", [lambda ids: (LOGITS, None), lambda ids, key: LOGITS])
def test_a_model_that_is_called_or_answers_differently_is_refused(model):
    with pytest.raises(
        ConfigError, match=r"LanguageModelTask calls .*\(logits \[B, T, V\], cache\)"
    ):
        task().compute_loss(model, BATCH, None)


def test_a_model_without_a_cache_is_not_decoded():
    without_cache = LanguageModelTask(
        functools.partial(layers.Linear, 8, 4), Learner(optax.sgd, 0.1)
    )
    prompts = {**BATCH, "prefix_lengths": np.ones(3, np.int32)}
    with pytest.raises(ConfigError, match="Linear has no init_cache"):
        without_cache.check_inputs(prompts, LanguageModelTask.required_decode_inputs, "prompts")


@pytest.mark.parametrize("of_task", [LanguageModelTask, SequenceToSequenceTask])
def test_rules_split_the_weights_that_layers_leave_whole(of_task):
    rules = WeightSharding(strategy=[("w", 'shard_dim("data", -1)')])
    model = functools.partial(layers.Linear, 8, 4)
    whole = of_task(model, Learner(optax.sgd, 0.1))
    ruled = of_task(model, Learner(optax.sgd, 0.1), weight_sharding=rules)
    expected = {"whole": PartitionSpec(None, None), "ruled": PartitionSpec(None, "data")}
    for name, task_of_model in {"whole": whole, "ruled": ruled}.items():
        layout, _ = layout_and_learner(task_of_model, {"replica": 1, "data": 4, "mdl": 2})
        assert layout.specs.mdl_vars["params"]["w"] == expected[name]
