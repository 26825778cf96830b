"""Which settings of --set a sweep tries several values of: told apart by what fields may hold."""

import ast

import pytest

from praxis_lite import ConfigError
from praxis_lite.config.experiment_overrides import value_after
from praxis_tools.sweep.space import Space, items_of, space_of
from tests.support.job_runs import home
from tests.support.swept_jobs import SWEPT

assert SWEPT
optuna = pytest.importorskip("optuna")


def values(*texts):
    return optuna.distributions.CategoricalDistribution(texts)


def space(*settings):
    home()
    from jobzoo.experiments import Tiny
    from jobzoo.swept import Swept

    experiment = Tiny if any("decoder" in x or "corpus" in x for x in settings) else Swept
    return space_of(settings, lambda given, path: value_after(experiment, given, path, ["jobzoo"]))


RATE, MESH = "task.learner.learning_rate", "mesh.ici_mesh_shape"
FILES = "datasets.train.corpus.files"


@pytest.mark.parametrize(
    "settings, searched",
    [
        ([f"{RATE}=1e-3,3e-3, 1e-2"], {RATE: values("1e-3", "3e-3", "1e-2")}),
        # A sequence's items are parted by commas, as always; several of them stand in brackets.
        ([f"{MESH}=1,3,2", f"{RATE}=1,2"], {RATE: values("1", "2")}),
        ([f"{MESH}=(1,3,2),(1,2,2)"], {MESH: values("(1,3,2)", "(1,2,2)")}),
        (
            ["task.learner.optimizer=adam,lion,optax.sgd"],
            {"task.learner.optimizer": values("adam", "lion", "optax.sgd")},
        ),
        # A later setting's field is there once an earlier one is set.
        (
            [
                f"{RATE}=cosine_decay_schedule()",
                f"{RATE}.init_value=1e-3,1e-2",
                f"{RATE}.decay_steps=7",
            ],
            {f"{RATE}.init_value": values("1e-3", "1e-2")},
        ),
        (["PRESET=a,b"], {"PRESET": values("a", "b")}),
        ([f"{FILES}='a/*','b,c'"], {FILES: values("'a/*'", "'b,c'")}),
        (["PRESET='a,b'", f"{RATE}=1,2"], {RATE: values("1", "2")}),
        (["run.log_every_steps=none,7"], {"run.log_every_steps": values("none", "7")}),
        (
            [f"{RATE}=1e-4..1e-2"],
            {RATE: optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True)},
        ),
        ([f"{RATE}=0.1..0.5"], {RATE: optuna.distributions.FloatDistribution(0.1, 0.5, log=False)}),
        (
            [f"{RATE}=0.1..0.5:log"],
            {RATE: optuna.distributions.FloatDistribution(0.1, 0.5, log=True)},
        ),
        ([f"{RATE}=0..1"], {RATE: optuna.distributions.FloatDistribution(0.0, 1.0, log=False)}),
        (
            ["datasets.train.batch_size=8..64:linear"],
            {"datasets.train.batch_size": optuna.distributions.IntDistribution(8, 64, log=False)},
        ),
        (
            ["datasets.train.batch_size=8..512"],
            {"datasets.train.batch_size": optuna.distributions.IntDistribution(8, 512, log=True)},
        ),
    ],
)
def test_values_are_told_from_sequences_by_the_field(settings, searched):
    actual = space(*settings)
    assert actual.searched == searched
    assert list(actual.fixed) == [x for x in settings if x.partition("=")[0] not in searched]


@pytest.mark.parametrize(
    "settings, words",
    [
        ([f"{RATE}=0.1"], "requires a setting to search"),
        ([f"{RATE}=1e-3,fast"], "found 'fast'"),
        (["task.learner.learning_rat=1,2"], "task.learner.learning_rate"),
        ([f"{MESH}=(1,3,2),(1,2,x)"], "1,2,x"),
        # A text with a comma, or two texts?
        ([f"{FILES}=a/*,b"], rf"'{FILES}=\"a/\*,b\"' .* '{FILES}=\"a/\*\",\"b\"' "),
        ([f"{RATE}=1e-2..1e-3"], "0.01; expected a number below the upper end 0.001"),
        ([f"{RATE}=0..1:log"], "above 0"),
        ([f"{RATE}=1,2", f"{RATE}=3"], "2 times"),
    ],
)
def test_what_is_ambiguous_or_no_value_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        space(*settings)


def test_a_field_that_holds_both_a_value_and_a_sequence_of_them_is_ambiguous():
    def value_of_any(settings, path):
        text = settings[-1].partition("=")[2] if settings else "None"
        return ast.literal_eval(text)

    with pytest.raises(ConfigError, match="--set x=7,8 .* 2 values to try"):
        space_of(["x=7,8"], value_of_any)


def test_a_grid_has_each_combination_in_order_and_no_range():
    given = Space(("a=1",), {"b": values("2", "3"), "c": values("x", "y")})
    assert [given.settings(values) for values in given.combinations()] == [
        ["a=1", "b=2", "c=x"],
        ["a=1", "b=2", "c=y"],
        ["a=1", "b=3", "c=x"],
        ["a=1", "b=3", "c=y"],
    ]
    assert list(given.to_check()) == [
        ["a=1", "b=2", "c=x"],
        ["a=1", "b=3", "c=x"],
        ["a=1", "b=2", "c=x"],
        ["a=1", "b=2", "c=y"],
    ]
    with pytest.raises(ConfigError, match="--search=random"):
        list(Space((), {"b": optuna.distributions.IntDistribution(1, 2)}).combinations())


@pytest.mark.parametrize(
    "text, items",
    [
        ("1", ["1"]),
        ("1,", ["1"]),
        ("a, b", ["a", "b"]),
        ("(1,2),[3,(4,5)]", ["(1,2)", "[3,(4,5)]"]),
        ("'a,b',\"c,'d\"", ["'a,b'", '"c,\'d"']),
        ("{'a': (1,2)},x", ["{'a': (1,2)}", "x"]),
    ],
)
def test_commas_in_brackets_and_quotes_part_nothing(text, items):
    assert items_of(text) == items
