"""A setting of an optimizer of Pax has its default here, or one that COUNTERPARTS states."""

import inspect

import pytest

from tests.optimizers.pax_learners import COUNTERPARTS, OF_REGULARIZED, OF_THE_LEARNER
from tests.support.goldens import golden

# Settings of every optimizer of Pax that are the learner's here, `regularized`'s, or not here.
ELSEWHERE = {
    "learning_rate", "lr_schedule", *OF_THE_LEARNER, *OF_REGULARIZED,
    "ewc_regularizer_weight", "ewc_weight_per_var",
}  # fmt: skip


def pax_defaults(name: str) -> dict:
    return golden("pax/cases.json")["class_defaults"][name.removesuffix(", optax")]


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_setting_of_pax_has_its_default_or_another_one_that_is_stated(name):
    ours = COUNTERPARTS[name]
    parameters = inspect.signature(ours.optimizer).parameters
    for setting, pax in pax_defaults(name).items():
        if setting in ELSEWHERE or setting in ours.without:
            continue
        local = ours.names.get(setting, setting)
        if local in ours.defaults:
            assert ours.defaults[local] == pax, setting
            assert parameters[local].default != pax, f"{setting}: no longer different"
        else:
            assert parameters[local].default == pax, setting


def test_every_optimizer_of_pax_that_is_tested_here_has_the_same_regularization_and_clipping():
    for name in COUNTERPARTS:
        assert pax_defaults(name).keys() >= ELSEWHERE
