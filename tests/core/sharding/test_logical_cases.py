"""A weight's names under a job's rules, case by case: the first rule that fits decides."""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support.declared_splits import CasesOfRules, refused, splits_of


class OneWeight(nnx.Module):
    """A weight [7, 13], with a dim of layers in front if it has three names."""

    def __init__(self, names, rules, rngs):
        shape = (3, 7, 13)[-max(2, len(names)) :]
        self.w = nnx.Param(jnp.zeros(shape), out_sharding=names, sharding_rules=rules)


def named(*names, rules=None):
    return functools.partial(OneWeight, names, rules)


def rules(*pairs, **settings):
    return {"logical_axis_rules": pairs, **settings}


E_M = rules(("embed", "data"), ("mlp", "mdl"))


def and_rules(*pairs, is_first=False, **settings):
    """Returns E_M with more rules, or with other settings."""
    ours = E_M["logical_axis_rules"]
    return rules(*((*pairs, *ours) if is_first else (*ours, *pairs)), **settings)


LISTS = {"one": [("embed", "mdl"), ("mlp", None)], "other": [("embed", None), ("mlp", "data")]}
THEN_FSDP = [(".*", 'logical_partitioning|fsdp("data", 0)')]
# By case: the weight's names, the job's rules, the split.
DECIDED = {
    "each has a rule": (named("embed", "mlp"), E_M, ("data", "mdl")),
    "dims in another order": (named("mlp", "embed"), E_M, ("mdl", "data")),
    "fewer names than dims": (named("mlp"), E_M, ("mdl", None)),
    "None for a name": (named(None, "mlp"), E_M, (None, "mdl")),
    # The first rule that fits, whatever the order of the dims.
    "the first of two": (
        named("embed", "mlp"), rules(("mlp", "mdl"), ("mlp", "data"), ("embed", None)),
        (None, "mdl"),
    ),
    "the second, as the first's axis is gone": (
        named("embed", "mlp"), rules(("embed", "mdl"), ("mlp", "mdl"), ("mlp", "data")),
        ("mdl", "data"),
    ),
    "the third": (
        named("embed", "mlp"),
        rules(("embed", ("data", "mdl")), ("mlp", "mdl"), ("mlp", "data"), ("mlp", "replica")),
        (("data", "mdl"), "replica"),
    ),
    "an axis of a tuple is gone": (
        named("embed", "mlp"), rules(("embed", "data"), ("mlp", ("data", "mdl"))), ("data", None)
    ),
    "None settles it": (
        named("embed", "mlp"), rules(("embed", None), ("embed", "data"), ("mlp", "mdl")),
        (None, "mdl"),
    ),
    "None as a last resort": (
        named("embed", "mlp"), rules(("mlp", "mdl"), ("embed", "mdl"), ("embed", None)),
        (None, "mdl"),
    ),
    "an empty tuple is None": (
        named("embed", "mlp"), rules(("embed", ()), ("embed", "data"), ("mlp", "mdl")),
        (None, "mdl"),
    ),
    "a list of axes": (
        named("embed", "mlp"), rules(("embed", ["replica", "data"]), ("mlp", "mdl")),
        (("replica", "data"), "mdl"),
    ),
    # Names that are axes stand for them, after all rules.
    "a name that is an axis": (named("data", "mlp"), E_M, ("data", "mdl")),
    "an axis that a rule has": (named("mdl", "mlp"), E_M, (None, "mdl")),
    "an axis with a rule of its own": (
        named("data", "mlp"), rules(("data", "mdl"), ("mlp", "data")), ("mdl", "data")
    ),
    "no rules": (named("mdl", None), {}, ("mdl", None)),
    # A weight's own rules come before the job's.
    "own rules": (named("embed", "mlp", rules=(("mlp", "data"),)), E_M, (None, "data")),
    "own rule of None": (named("embed", "mlp", rules=(("mlp", None),)), E_M, ("data", None)),
    "own rules, the job's as a fallback": (
        named("embed", "mlp", rules=(("embed", "mdl"), ("mlp", "mdl"))),
        rules(("mlp", "data")), ("mdl", "data"),
    ),
    # A name without a rule may be left whole.
    "left whole": (
        named("embd", "mlp"), rules(("mlp", "mdl"), unmapped_logical_axes="replicate"),
        (None, "mdl"),
    ),
    "one of several lists": (
        named("embed", "mlp"),
        {"logical_axis_rules": LISTS, "logical_axis_rules_name": "other"}, (None, "data"),
    ),
    # A dim of layers needs no rule, and may have one.
    "layers": (named("layers", "embed", "mlp"), E_M, (None, "data", "mdl")),
    "layers with a rule": (
        named("layers", "embed", "mlp"), and_rules(("layers", "mdl"), is_first=True),
        ("mdl", "data", None),
    ),
    "layers of another name": (
        named("blocks", "embed", "mlp"), and_rules(stack_axis_names=("blocks",)),
        (None, "data", "mdl"),
    ),
    # Rules by path: names count where they are asked.
    "a pattern, names not asked": (
        named("embed", "mlp"), and_rules(strategy=[(".*", 'fsdp("mdl", 0)')]), (None, "mdl"),
    ),
    "a pattern, names first": (
        named("mlp", None), rules(("mlp", "mdl"), strategy=THEN_FSDP), ("mdl", "data")
    ),
    "a pattern, names last": (
        named("mlp", "embed"),
        rules(("embed", "mdl"), ("mlp", None),
              strategy=[(".*", 'shard_dim("data", 0)|logical_partitioning')]), ("data", "mdl"),
    ),
}
SPLITS = CasesOfRules(splits_of, DECIDED)


@pytest.mark.parametrize("case", DECIDED)
def test_names_take_the_axes_of_the_first_rule_that_fits(case):
    assert SPLITS.of(case) == {"w": DECIDED[case][-1]}


WRONG = {
    "no rule": (named("embd", "mlp"), E_M, ["w:", "'embd'", "no rule", "embed", "('embd', AXES)"]),
    "no rule, own rules": (
        named("embd", rules=(("mlp", None),)), {}, ["'embd'", "There are rules for mlp"]
    ),
    "a name twice": (named("mlp", "mlp"), E_M, ["w:", "'mlp' twice", "another name, or None"]),
    "a rule's unknown axis": (
        named("mlp"), rules(("mlp", "model")), ["('mlp', 'model')", "'model'", "Did you mean mdl"]
    ),
    "own rule's unknown axis": (
        named("mlp", rules=(("mlp", "model"),)), {}, ["w,", "'model'", "Did you mean mdl"]
    ),
    "a dim that a pattern has split": (
        named("embed", "mlp"),
        and_rules(strategy=[(".*", 'shard_dim("replica", 0)|logical_partitioning')]),
        ["w:", "'embed' wants dim 0", "replica splits already", "Remove one"],
    ),
    "replicate after names": (
        named("embed", "mlp"),
        and_rules(strategy=[(".*", "logical_partitioning|replicate")]),
        ["`replicate`", "('data', 'mdl')"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_that_do_not_fit_say_what_was_found_and_wanted(case):
    make, declared, words = WRONG[case]
    with refused(words):
        splits_of(make, **declared)
