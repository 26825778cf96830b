"""Scores of continuations, against NumPy on the logits of the model's own forward pass."""

import copy
import functools
import types

import fiddle as fdl
import numpy as np
import pytest

from praxis_lite import ConfigError, huggingface
from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.experiment.registry import get_experiment
from praxis_lite.inputs.text.length_classes import (
    all_length_classes,
    batches_by_length,
    length_class,
    length_of_prompts,
)
from praxis_lite.job.processes.logs import command_log
from praxis_tools.lm_eval import progress
from praxis_tools.lm_eval.evaluated_model import evaluated_model
from praxis_tools.lm_eval.log_likelihoods import LogLikelihoods
from tests.decode.toy_models import num_compiled
from tests.support.lm_eval_tasks import model_directory
from tests.support.log_lines import terminal_text

MESH = (1, 3, 2)  # Divides neither heads nor vocabulary.


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = model_directory(tmp_path_factory.mktemp("model"), "llama")
    return huggingface.load(directory, make_mesh(MeshConfig(ici_mesh_shape=MESH)))


@pytest.fixture(scope="module")
def scorer(loaded):
    return LogLikelihoods(evaluated_model(loaded), 6)


@functools.cache
def pairs():
    """Contexts and continuations of all lengths; the fourth continuation is made the likeliest."""
    rng = np.random.default_rng(0)
    lengths = [(1, 1), (3, 7), (19, 2), (29, 1), (40, 11), (90, 37), (1, 128), (127, 2)]
    return [tuple(rng.integers(3, 101, n).tolist() for n in pair) for pair in lengths]


def by_hand(model, context, continuation):
    """Returns the score in float64 of logits of the row alone."""
    row = [*context, *continuation]
    padded = [*row[:-1], *[0] * (129 - len(row))]  # One program for all.
    logits = model.logits([padded])[0].astype(np.float64)
    total, is_greedy = 0.0, True
    for place in range(len(context), len(row)):
        item = logits[place - 1]
        total += item[row[place]] - item.max() - np.log(np.exp(item - item.max()).sum())
        is_greedy &= int(item.argmax()) == row[place]
    return total, is_greedy


@pytest.mark.slow
def test_scores_are_those_of_the_forward_pass_and_each_class_of_lengths_compiles_once(
    loaded, scorer
):
    given = list(pairs())
    likeliest = loaded.generate([given[3][0]], max_new_tokens=3)[0]
    given[3] = given[3][0], likeliest
    before = num_compiled()
    scores = scorer.score(given)
    # Eight rows in batches of six, the longest first: the classes are 128 and 32.
    assert num_compiled() - before == 2
    assert scorer.score(given[::-1]) == scores[::-1]
    assert num_compiled() - before == 2
    for pair, score in zip(given, scores, strict=True):
        total, is_greedy = by_hand(loaded, *pair)
        assert abs(score.log_likelihood - total) < 1e-4
        assert score.is_greedy == is_greedy
    assert [score.is_greedy for score in scores].count(True) == 1


def test_what_is_too_long_loses_its_first_ids_with_a_warning(scorer, caplog):
    context, continuation = list(range(3, 93)) * 2, [5, 6, 7]
    cut = scorer.score([(context[54:], continuation)])  # 126 + 3 ids: one more than 128.
    assert not warnings_in(caplog)
    assert scorer.score([(context, continuation)]) == cut
    assert scorer.score([(context[53:], continuation)]) == cut
    message = "a context of {} ids and a continuation of 3 exceed max_length, 128: the first {} ids"
    assert [item.removesuffix(" are removed") for item in warnings_in(caplog)] == [
        message.format(180, 54),
        message.format(127, 1),
    ]


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("pair, words", [
    (([], [5]), "0 ids of context and 1 of continuation"),
    (([5], []), "1 ids of context and 0 of continuation"),
    (([5], [6] * 129), "has 129 ids, but max_length is 128"),
    (([5, 101], [6]), "101"),
])  # fmt: skip
def test_what_cannot_be_scored_is_named(scorer, pair, words):
    with pytest.raises(ConfigError, match=words):
        scorer.score([pair])


def test_classes_of_lengths_are_powers_of_two_up_to_the_longest():
    assert [length_class(n, 100) for n in (1, 32, 33, 64, 65, 100)] == [32, 32, 64, 64, 100, 100]
    assert length_class(3, 7) == 7
    assert all_length_classes(100) == (32, 64, 100) and all_length_classes(64) == (32, 64)
    # Prompts leave room for what follows them, if the longest does.
    assert [length_of_prompts(33, 16, most) for most in (None, 200, 64, 40)] == [64, 64, 48, 33]
    batches = list(batches_by_length([5, 90, 33, 64, 7], 2, 100))
    assert batches == [([1, 3], 100), ([2, 4], 64), ([0], 32)]


@pytest.mark.parametrize("max_length, words", [
    (129, "max_length is 129; .*128"), (0, "max_length is 0"),
])  # fmt: skip
def test_a_length_that_the_model_has_not_is_an_error(loaded, max_length, words):
    with pytest.raises(ConfigError, match=words):
        evaluated_model(loaded, max_length)


def test_what_is_no_language_model_of_text_is_an_error(loaded):
    def asked(task):
        model = copy.copy(loaded)
        model.partitioner = types.SimpleNamespace(task=fdl.build(task))
        return evaluated_model(model)

    def experiment(name):
        return get_experiment(name)().config().task

    with pytest.raises(ConfigError, match="generates text, but SequenceToSequenceTask"):
        asked(experiment("seq2seq.Reverse"))
    with pytest.raises(ConfigError, match="101 ids, .* no tokenizer.*task.tokenizer"):
        asked(fdl.copy_with(loaded.experiment.task, tokenizer=None))
    bidirectional = experiment("lm.PyDocs")
    bidirectional.model.model_type = "bidirectional"
    with pytest.raises(ConfigError, match="model_type is 'bidirectional'; expected 'causal'"):
        asked(bidirectional)
    with pytest.raises(ConfigError, match="model is 'str'"):
        evaluated_model("job")


def test_a_command_prints_its_progress_every_20_seconds(capsys, monkeypatch):
    clock = iter([0.0, 9.0, 21.0, 30.0, 32.0])
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    scoring = progress.Progress("scored", 11)
    with command_log():
        for count in (3, 3, 3, 2):
            scoring.add(count)
    assert terminal_text(capsys.readouterr().out).splitlines() == [
        "scored 6 of 11 requests in 21 s",
        "scored 11 of 11 requests in 32 s",
    ]
