"""Which optimizer has which weight: patterns, errors that name the weights, groups by stack."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import AuxiliaryOptimizer, Learner, WeightSpec
from praxis_lite.core.learner.optimizer_groups import optimizer_names
from praxis_lite.core.learner.weight_groups import Group, merged
from praxis_lite.core.sharding.weight_spec import spec_items
from praxis_lite.optimizers import path_mask
from praxis_lite.trainer.layout_table import optimizer_report

F32 = jnp.dtype("float32")
SPECS = {
    "embedding": {"w": WeightSpec((13, 5), F32)},
    "blocks": {
        "attention": {"w": WeightSpec((3, 5, 7), F32, None, (None,))},
        "norm": {"scale": WeightSpec((3, 5), F32, None, (None,))},
    },
    "deep": {"w": WeightSpec((2, 3, 5), F32, None, (None, None))},
    "softmax": {"b": WeightSpec((13,), F32), "w": WeightSpec((5, 13), F32)},
}
PATHS = {
    "embedding/w", "blocks/attention/w", "blocks/norm/scale", "deep/w", "softmax/b", "softmax/w",
}  # fmt: skip


def aux(regex, name="other"):
    return AuxiliaryOptimizer(regex, optax.sgd, 0.1, name)


def names(**choices) -> dict[str, str]:
    return optimizer_names(["/".join(path) for path, _ in spec_items(SPECS)], **choices)


def test_without_patterns_the_main_optimizer_has_all():
    assert names() == dict.fromkeys(PATHS, "")


def test_auxiliary_optimizers_have_what_their_patterns_match_from_the_start():
    actual = names(auxiliary=[aux("blocks/.*/w", "matrices"), aux("softmax", "head")])
    assert actual == {
        "embedding/w": "", "blocks/norm/scale": "", "deep/w": "",
        "blocks/attention/w": "matrices", "softmax/b": "head", "softmax/w": "head",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choices", "trained"),
    [
        (
            {"exclusion": ["softmax/.*", ".*/norm/.*"]},
            PATHS - {"softmax/b", "softmax/w", "blocks/norm/scale"},
        ),
        (
            {"inclusion": ["softmax/.", ".*/norm/scale"]},
            {"softmax/b", "softmax/w", "blocks/norm/scale"},
        ),
        ({"inclusion": ["deep/.", ".*x/w"]}, {"deep/w", "softmax/w"}),
    ],
)
def test_what_is_frozen_has_no_optimizer(choices, trained):
    assert names(**choices).keys() == trained


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"auxiliary": [aux("softmax/v")]},
            "'other'.*'softmax/v'.*softmax/w.*6.*embedding/w.*1",
        ),
        (
            {"exclusion": ["softmax"]},  # The beginning of two paths.
            "bprop_variable_exclusion.*'softmax'",
        ),
        ({"inclusion": ["softmax/.*", "lora"]}, "variable_inclusion.*'lora'"),
        (
            {"exclusion": ["params/softmax"]},
            "'params/softmax'.*params/",
        ),
        (
            {"auxiliary": [aux("softmax", "head"), aux(".*/w", "matrices")]},
            "softmax/w.*'head'.*'matrices'",
        ),
        (
            {"auxiliary": [aux("softmax/b")], "exclusion": ["softmax/."]},
            "'other'.*'softmax/b'.*softmax/b",
        ),
        ({"exclusion": [".*"]}, r"bprop_variable_exclusion.*\['\.\*'\].*6"),
    ],
)
def test_a_choice_that_cannot_be_meant_names_the_weights(choices, message):
    with pytest.raises(ConfigError, match=message):
        names(**choices)


def test_a_frozen_weight_is_in_no_overlap():
    both = [aux("softmax", "head"), aux(".*/b", "biases"), aux("deep", "deep")]
    with pytest.raises(ConfigError, match="softmax/b.*'head'.*'biases'"):
        names(auxiliary=both)
    with pytest.raises(ConfigError, match=r"'biases'.*'\.\*/b'"):
        names(auxiliary=both, exclusion=["softmax/b"])
    assert (
        names(
            auxiliary=[aux("softmax", "head"), aux("deep|softmax/b", "deep")],
            exclusion=["softmax/b"],
        )["softmax/w"]
        == "head"
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: aux("softmax/["), r"AuxiliaryOptimizer\.regex.*'other'.*'softmax/\['"),
        (lambda: aux("softmax", "a/b"), r"AuxiliaryOptimizer\.name.*'a/b'"),
        (lambda: aux("softmax", ""), r"AuxiliaryOptimizer\.name.*''"),
        (
            lambda: Learner(optax.sgd, 0.1, auxiliary_optimizers=[aux("softmax"), aux("deep")]),
            r"Learner\.auxiliary_optimizers.*'other'",
        ),
        (
            lambda: Learner(
                optax.sgd,
                0.1,
                auxiliary_optimizers=[
                    AuxiliaryOptimizer(
                        ".*", optax.sgd, 1.0, "head", clip_gradient_norm_to_value=1.0
                    )
                ],
            ),
            "'head'.*clip_gradient_.*apply_separate_scaling.*False",
        ),
        (
            lambda: Learner(
                optax.sgd,
                0.1,
                apply_separate_scaling=True,
                auxiliary_optimizers=[
                    AuxiliaryOptimizer(
                        ".*", optax.sgd, 1.0, "head", clip_gradient_norm_to_value=-1.0
                    )
                ],
            ),
            r"AuxiliaryOptimizer.*'head'\.clip_gradient_norm_to_value.*-1\.0",
        ),
        (
            lambda: Learner(optax.sgd, 0.1, apply_separate_scaling=True),
            r"Learner\.apply_separate_scaling.* auxiliary_optimizers",
        ),
        (
            lambda: Learner(optax.sgd, 0.1, bprop_variable_exclusion="("),
            r"Learner\.bprop_variable_exclusion.*'\('",
        ),
        (
            lambda: Learner(optax.sgd, 0.1, bprop_variable_inclusion=[None]),
            r"Learner\.bprop_variable_inclusion.*None",
        ),
        (
            lambda: Learner(
                optax.sgd, 0.1, bprop_variable_exclusion="a", bprop_variable_inclusion=["b"]
            ),
            r"bprop_variable_exclusion.*\['a'\].*bprop_variable_inclusion.*\['b'\]",
        ),
    ],
)
def test_settings_are_checked_before_there_are_weights(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_function_of_one_layer_is_mapped_over_every_stacked_dim():
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    group = Group(optax.identity(), (2, 3), (("w",),))
    norms = group.per_layer(lambda tree: jnp.sqrt(jnp.sum(tree["w"] ** 2)))({"w": x})
    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=-1), rtol=1e-6)
    single = dataclasses.replace(group, stack_shape=())
    np.testing.assert_allclose(
        single.per_layer(lambda tree: jnp.sum(tree["w"]))({"w": x}), x.sum(), rtol=1e-5
    )


def test_the_report_says_what_each_optimizer_has_and_what_is_frozen():
    learner = Learner(
        optax.adamw, 0.1,
        auxiliary_optimizers=[aux("softmax", "head")], bprop_variable_exclusion=["blocks/.*"],
    )  # fmt: skip
    assert optimizer_report(learner.bind(SPECS).groups) == [
        "main optimizer: 2 weights, 95 parameters: embedding/w, deep/w",
        "frozen: 2 weights, 120 parameters: blocks/attention/w, blocks/norm/scale",
        "optimizer 'head': 2 weights, 78 parameters: softmax/b, softmax/w",
    ]
    assert optimizer_report(Learner(optax.adamw, 0.1).bind(SPECS).groups) == []
    all_auxiliary = Learner(optax.adamw, 0.1, auxiliary_optimizers=[aux(".*")])
    assert optimizer_report(all_auxiliary.bind(SPECS).groups) == [
        "optimizer 'other': 6 weights, 293 parameters: embedding/w, blocks/attention/w, and 4 more"
    ]


def test_the_learner_groups_by_optimizer_and_stack():
    learner = Learner(
        optax.adamw, 0.1,
        auxiliary_optimizers=[aux(".*/w", "matrices")], bprop_variable_exclusion="softmax/w",
    )  # fmt: skip
    trainable, frozen = learner.bind(SPECS).groups.split(SPECS)
    assert frozen == {"softmax": {"w": SPECS["softmax"]["w"]}}
    assert merged(trainable, frozen) == SPECS
    groups = learner.bind(SPECS).groups.by_name
    for tree in (SPECS, trainable):
        actual = {
            name: (
                group.stack_shape,
                {"/".join(path) for path, _ in spec_items(group.select(tree))},
            )
            for name, group in groups.items()
        }
        assert actual == {
            "unstacked": ((), {"softmax/b"}),
            "stack_3": ((3,), {"blocks/norm/scale"}),
            "matrices.unstacked": ((), {"embedding/w"}),
            "matrices.stack_3": ((3,), {"blocks/attention/w"}),
            "matrices.stack_2x3": ((2, 3), {"deep/w"}),
        }
        assert groups["stack_3"].optimizer.init.__wrapped__ is learner.optimizer.init
        assert groups["matrices.stack_3"].optimizer.init.__wrapped__ is not learner.optimizer.init


def test_a_pattern_of_a_mask_that_matches_no_weight_of_the_model_is_named():
    def init(pattern):
        adamw = functools.partial(optax.adamw, mask=path_mask(exclude=pattern))
        learner = Learner(adamw, 0.1, auxiliary_optimizers=[aux("blocks")])
        shapes = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
            SPECS, is_leaf=lambda x: isinstance(x, WeightSpec),
        )  # fmt: skip
        jax.eval_shape(learner.bind(SPECS).init, shapes)

    init(".*/norm")  # Of another optimizer's weights: nothing is wrong with that.
    with pytest.raises(ConfigError, match=r"'\.\*/nrom'"):
        init(".*/nrom")


def test_a_model_without_weights_has_no_groups():
    learner = Learner(optax.sgd, 0.1)
    bound = learner.bind({})
    assert bound.groups.by_name == {} and bound.groups.split({}) == ({}, {})
    assert jax.tree.leaves(bound.init({})["slots"]) == []
