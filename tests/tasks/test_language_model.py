"""The language-model task against NumPy: loss, bits, accuracy; and what it writes of a decode."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.errors import ConfigError
from praxis_lite.learner import Learner
from tasks.language_model import LanguageModelTask

RNG = np.random.default_rng(15)
LOGITS = RNG.normal(size=(3, 5, 7)).astype(np.float32)
BATCH = {
    "ids": np.zeros((3, 5), np.int32),
    "labels": RNG.integers(0, 7, (3, 5), dtype=np.int32),
    "weights": np.asarray([[1, 1, 1, 1, 1], [1, 1, 0.5, 0, 0], [0, 0, 0, 0, 0]], np.float32),
}


def task(**options) -> LanguageModelTask:
    return LanguageModelTask(lambda rngs: None, Learner(optax.sgd, 0.1), **options)


def metrics_of(batch):
    return task().compute_loss(lambda ids, key: (jnp.asarray(LOGITS), None), batch, None)


def test_loss_bits_and_accuracy_are_means_over_weighted_tokens():
    metrics, total, hits = metrics_of(BATCH), 0.0, 0.0
    for b in range(3):
        for t in range(5):
            row, label, w = LOGITS[b, t].astype(np.float64), *(
                BATCH[k][b, t] for k in ("labels", "weights")
            )
            total += w * (np.log(np.exp(row).sum()) - row[label])
            hits += w * (row.argmax() == label)
    num_tokens = BATCH["weights"].sum()
    assert num_tokens == 7.5
    wanted = {
        "loss": total / num_tokens,
        "bits_per_byte": total / num_tokens / np.log(2),
        "accuracy": hits / num_tokens,
    }
    assert set(metrics) == set(wanted)
    for name, (value, weight) in metrics.items():
        assert float(value) == pytest.approx(wanted[name], rel=1e-6), name
        assert float(weight) == num_tokens


def test_a_batch_of_filler_alone_weighs_nothing_and_is_finite():
    metrics = metrics_of({**BATCH, "weights": np.zeros((3, 5), np.float32)})
    assert {name: tuple(map(float, pair)) for name, pair in metrics.items()} == {
        "loss": (0.0, 0.0), "bits_per_byte": (0.0, 0.0), "accuracy": (0.0, 0.0)
    }


def test_records_hold_the_text_of_true_rows_only():
    eos = 256
    inputs = {
        "ids": np.asarray([[eos, *b"ab"], [eos, *b"x\0"], [0, 0, 0]], np.int32),
        "prefix_lengths": np.asarray([3, 2, 0]),
        "weights": np.asarray([1.0, 1.0, 0.0]),
    }
    outputs = {
        "output_ids": np.asarray([[*b"cd", eos, 0], [*b"wxyz"], [0, 0, 0, 0]], np.int32),
        "decode_lengths": np.asarray([3, 4, 0]),
        "log_probs": np.asarray([-1.5, -2.5, 0.0], np.float32),
    }
    assert task().decode_to_records(inputs, outputs) == [
        {
            "prompt": "ab", "continuation": "cd", "prefix_length": 3, "decode_length": 3,
            "ended": True, "log_prob": -1.5, "output_ids": [99, 100, eos],
        },
        {
            "prompt": "x", "continuation": "wxyz", "prefix_length": 2, "decode_length": 4,
            "ended": False, "log_prob": -2.5, "output_ids": [119, 120, 121, 122],
        },
    ]


def test_a_missing_input_names_the_key_the_dataset_and_what_there_is():
    spec = {"ids": None, "label": None, "weights": None}
    lm = task()
    with pytest.raises(ConfigError, match=r"'labels'.*datasets\.train.*'label'"):
        lm.check_inputs(spec, lm.required_inputs, "datasets.train")


def test_decoding_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"max_decode_steps is 0"):
        task(max_decode_steps=0)


def test_a_task_that_does_not_decode_says_so():
    from tasks.image_classification import ClassificationTask

    classifier = ClassificationTask(lambda rngs: None, Learner(functools.partial(optax.sgd), 0.1))
    with pytest.raises(ConfigError, match="ClassificationTask does not decode"):
        classifier.decode(None, {}, None)
