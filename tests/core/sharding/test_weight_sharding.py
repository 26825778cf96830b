"""What a job says of weights: one tree of specs whatever declared them, and who decided."""

import dataclasses
import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import spmd
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.core import (
    Fsdp,
    Learner,
    MeshConfig,
    Partitioner,
    WeightSharding,
    WeightSpec,
    make_mesh,
)
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.partitioner.task_on_mesh import flax_axis_rules
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.core.sharding.weight_sharding import decide_shardings
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

P = PartitionSpec
AXIS_SIZES = {"replica": 1, "data": 4, "mdl": 2}
RULES = (("vocab", ("data", "mdl")), ("mlp", "mdl"), ("embed", "data"))
SHAPES = {
    "embedding": (257, 7),
    "blocks/up": (3, 7, 13),
    "blocks/bias": (3, 13),
    "head": (7, 13),
    "scale": (),
}
NAMES = {
    "embedding": ("vocab", "embed"),
    "blocks/up": ("layers", "embed", "mlp"),
    "blocks/bias": ("layers", "mlp"),
}


def nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        functools.reduce(lambda node, part: node.setdefault(part, {}), parents, tree)[name] = leaf
    return tree


def weights(**changes):
    """Returns a model's specs, float32, with NAMES; `changes` to a weight's fields by its path."""
    specs = {}
    for path, shape in SHAPES.items():
        spec = WeightSpec(shape, jnp.dtype("float32"), logical_axes=NAMES.get(path))
        specs[path] = dataclasses.replace(spec, **changes.get(path.replace("/", "_"), {}))
    return {"params": nested(specs), "non_trainable": {}}


def decide(tree=None, **declared):
    """Returns {path under params: PartitionSpec}, {path: declared_by}, and the notes."""
    decisions = decide_shardings(tree or weights(), WeightSharding(**declared), AXIS_SIZES)
    leaves = {path.removeprefix("params/"): s for path, s in spec_leaves(decisions.weight_specs)}
    assert all(spec.logical_axes is None for spec in leaves.values())
    specs = {path: s.partition_spec(tuple(AXIS_SIZES), path) for path, s in leaves.items()}
    return specs, {path: s.declared_by for path, s in leaves.items()}, decisions.notes


def test_what_layers_declare_in_mesh_axes_stays_and_says_so():
    tree = weights(
        embedding=dict(logical_axes=None, split_dims_mapping=(1, None)),
        blocks_up=dict(
            logical_axes=None, split_dims_mapping=("data",), stack_split_dims_mapping=("replica",)
        ),
        blocks_bias=dict(logical_axes=None, stack_split_dims_mapping=("mdl",)),
        head=dict(split_dims_mapping=("mdl", None), declared_by="specs ('mdl', None)"),
    )
    decisions = decide_shardings(tree, None, AXIS_SIZES)
    assert decisions.notes == ()
    for (path, old), (_, new) in zip(
        spec_leaves(tree), spec_leaves(decisions.weight_specs), strict=True
    ):
        assert dataclasses.replace(new, declared_by=old.declared_by) == old, path
    assert {p: s.declared_by for p, s in spec_leaves(decisions.weight_specs)} == {
        "params/embedding": "weight_split_dims_mapping",
        "params/blocks/up": "weight_split_dims_mapping",
        "params/blocks/bias": "the stack's split",
        "params/head": "specs ('mdl', None)",
        "params/scale": "default: no split declared",
    }


def test_names_become_mesh_axes_and_leading_stacks_stay_stacks():
    tree = weights(blocks_up=dict(declared_by="nnx out_sharding ('layers', 'embed', 'mlp')"))
    specs, by, notes = decide(tree, logical_axis_rules=RULES)
    assert specs == {
        "embedding": P(("data", "mdl"), None),
        "blocks/up": P(None, "data", "mdl"),
        "blocks/bias": P(None, "mdl"),
        "head": P(None, None),
        "scale": P(),
    }
    assert by["embedding"] == "logical axes ('vocab', 'embed'): vocab->data+mdl"
    assert by["blocks/up"] == ("nnx out_sharding ('layers', 'embed', 'mlp'): embed->data, mlp->mdl")
    assert notes == (
        "embedding [257, 7]: logical axes ('vocab', 'embed'): 'embed' cannot use data (used by "
        "'vocab').",
        "head [7, 13], scale []: replicated: no pattern or name splits it.",
    )
    decided = dict(
        spec_leaves(
            decide_shardings(
                tree, WeightSharding(logical_axis_rules=RULES), AXIS_SIZES
            ).weight_specs
        )
    )
    assert decided["params/blocks/up"].stack_shape == (3,)
    assert decided["params/embedding"].stack_shape == ()
    # A stack may have a rule, and other names.
    specs, _, _ = decide(logical_axis_rules=(("layers", "mdl"), *RULES))
    assert specs["blocks/up"] == P("mdl", "data", None)
    decided = dict(
        spec_leaves(
            decide_shardings(
                weights(),
                WeightSharding(
                    logical_axis_rules=(*RULES, ("layers", None)), stack_axis_names=("vocab",)
                ),
                AXIS_SIZES,
            ).weight_specs
        )
    )
    assert decided["params/blocks/up"].stack_shape == ()
    assert decided["params/embedding"].stack_shape == (257,)


def test_a_weights_own_rules_come_before_the_jobs():
    tree = weights(blocks_up=dict(logical_axis_rules=(("mlp", "replica"),)))
    specs, _, _ = decide(tree, logical_axis_rules=RULES)
    assert specs["blocks/up"] == P(None, "data", "replica")
    assert specs["blocks/bias"] == P(None, "mdl")


def test_the_split_of_a_stack_stands_beside_names():
    tree = weights(
        blocks_up=dict(stack_split_dims_mapping=("mdl",), logical_axes=("mdl", "embed", "mlp"))
    )
    specs, _, notes = decide(tree, logical_axis_rules=RULES)
    assert specs["blocks/up"] == P("mdl", "data", None)
    # Nothing is said of the stack's own axis.
    (about,) = (note for note in notes if note.startswith("blocks/up"))
    assert about == (
        "blocks/up [3, 7, 13]: logical axes ('mdl', 'embed', 'mlp'): 'mlp' cannot use mdl "
        "(used by another dim)."
    )


def test_one_of_several_lists_of_rules_is_chosen_by_name():
    sets = {"tensor": RULES, "whole": [("vocab", None), ("mlp", None), ("embed", [])]}
    for name in sets:
        by_name = decide(logical_axis_rules=sets, logical_axis_rules_name=name)
        assert by_name == decide(logical_axis_rules=sets[name])
    assert set(by_name[0].values()) == {P(), P(None, None), P(None, None, None)}


def test_a_strategy_splits_what_declares_nothing_and_extends_what_does():
    tree = weights(head=dict(split_dims_mapping=("mdl",)))
    specs, by, notes = decide(
        tree,
        strategy=[
            ("embedding", "shard_dim('mdl', -1)"),
            (".*/up", ["logical_partitioning", Fsdp("data", min_weight_size=8)]),
            ("blocks/.*|head", "fsdp('data', 0)"),
            ("scale|head", "fsdp('data')"),
            ("head", "replicate"),
        ],
        logical_axis_rules=(("mlp", "mdl"), ("embed", None)),
    )
    assert specs == {
        "embedding": P(None, "mdl"),
        "blocks/up": P(None, "data", "mdl"),
        "blocks/bias": P(None, "data"),
        "head": P("mdl", "data"),
        "scale": P(),
    }
    assert by == {
        "embedding": "rule 'embedding': shard_dim('mdl', -1)",
        "blocks/up": "rule '.*/up': mlp->mdl|fsdp('data', min_weight_size=8)",
        "blocks/bias": "rule 'blocks/.*|head': fsdp('data', min_size_to_shard_mb=0)",
        "head": "weight_split_dims_mapping, then rule 'blocks/.*|head': "
        "fsdp('data', min_size_to_shard_mb=0)",
        "scale": "rule 'scale|head': fsdp('data') does not change it",
    }
    assert notes == (
        "embedding [257, 7]: rule 'embedding': logical names are ignored without the rule "
        "logical_partitioning.",
        "blocks/bias [3, 13]: rule 'blocks/.*|head': logical names are ignored without the rule "
        "logical_partitioning.",
        "scale []: rule 'scale|head': fsdp('data'): replicated, size at most 4 MiB.",
        "rule 'head' is unused: earlier patterns match all of its weights.",
    )


def test_weights_of_which_the_same_is_to_be_said_share_a_sentence():
    specs = {f"w{i}": WeightSpec((7,), jnp.dtype("float32")) for i in range(100)}
    tree = {"params": specs, "non_trainable": {"seen": WeightSpec((8,), jnp.dtype("float32"))}}
    notes = decide_shardings(
        tree, WeightSharding(strategy=[(".*", "fsdp('data')")]), AXIS_SIZES
    ).notes
    assert notes == (
        "100 weights, such as w0 [7], w1 [7]: rule '.*': fsdp('data'): replicated, size at most "
        "4 MiB.",
    )


def test_padding_may_be_refused():
    whole = dict(logical_axes=None)
    tree = weights(embedding=whole, blocks_up=whole, blocks_bias=whole)
    strategy = [(".*", "fsdp('data', 0)")]
    specs, _, notes = decide(tree, strategy=strategy, allow_padding=False)
    assert set(specs.values()) == {P(), P(None, None), P(None, None, None)}
    assert notes[0].startswith("5 weights, such as embedding [257, 7], blocks/up [3, 7, 13]: ")
    specs, _, _ = decide(tree, strategy=strategy)
    assert specs["embedding"] == P("data", None) and specs["head"] == P(None, "data")


def test_a_name_without_a_rule_may_be_left_whole():
    specs, _, notes = decide(logical_axis_rules=RULES[:2], unmapped_logical_axes="replicate")
    assert specs["blocks/up"] == P(None, None, "mdl")
    assert (
        "blocks/up [3, 7, 13]: logical axes ('layers', 'embed', 'mlp'): no rule for 'embed'."
        in notes
    )
    # A mesh axis needs no rule.
    tree = weights(embedding=dict(logical_axes=("mdl", None)))
    assert decide(tree, logical_axis_rules=RULES)[0]["embedding"] == P("mdl", None)


@pytest.mark.parametrize(
    ("changes", "declared", "message"),
    [
        ({}, dict(strategy=[("heed", "replicate")]), r"'heed'.*head\?"),
        ({}, dict(strategy=[("up", "replicate")]), "'up'.*blocks/up"),
        ({}, dict(strategy=[("params/head", "replicate")]), "'params/head'.*params/"),
        (
            dict(head=dict(split_dims_mapping=("data",))),
            dict(strategy=[(".*", "shard_dim('mdl', 0, True)")]),
            r"head.*\('mdl', 0.*data",
        ),
        ({}, dict(strategy=[(".*", "fsdp('date')")]), r"embedding.*'date'.*data\?"),
        ({}, dict(strategy=[(".*", "shard_dim('data', 0)")]), r"scale: shard_dim.*shape \(\)"),
        (
            {},
            dict(strategy=[("emb.*", "replicate"), (".*", "logical_partitioning")]),
            "blocks/up.*'embed'",
        ),
        ({}, dict(), r"embedding.*\('vocab', AXES\)"),
        ({}, dict(logical_axis_rules=(*RULES[:2], ("embad", None))), r"embedding.*embad\?"),
        ({}, dict(logical_axis_rules=[("mlp", "model")]), r"\('mlp', 'model'\).*'model'"),
        (
            dict(head=dict(logical_axes=("embed", None, "mlp"))),
            dict(logical_axis_rules=RULES),
            r"head.*3.*\('embed', None, 'mlp'\)",
        ),
        (
            dict(head=dict(logical_axes=("mlp", "mlp"))),
            dict(logical_axis_rules=RULES),
            r"head.*\('mlp', 'mlp'\)",
        ),
        (
            dict(head=dict(logical_axes=("mlp",), logical_axis_rules=(("mlp", "model"),))),
            dict(logical_axis_rules=RULES),
            "head.*logical_partitioning.*'model'",
        ),
        (
            dict(head=dict(split_dims_mapping=("data", None, "mdl"))),
            dict(logical_axis_rules=RULES),
            "params/head: .*3 entries",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_path(changes, declared, message):
    with pytest.raises(ConfigError, match=message):
        decide(weights(**changes), **declared)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (dict(strategy=[("(", "replicate")]), r"strategy.*'\('"),
        (dict(strategy=[]), r"strategy.*\[\].*\(pattern, rules\)"),
        (dict(strategy=[("head", "replicate"), (".*", [])]), r"'\.\*'.*'replicate'"),
        (dict(strategy=[(".*", "fdsp('data')")]), r"'fdsp'.*fsdp\?"),
        (dict(logical_axis_rules={"a": RULES}), r"logical_axis_rules_name.*None.* a\."),
        (dict(logical_axis_rules={"one": RULES}, logical_axis_rules_name="on"), r"'on'.*one\?"),
        (
            dict(logical_axis_rules=RULES, logical_axis_rules_name="a"),
            "logical_axis_rules_name.*'a'.*logical_axis_rules",
        ),
        (
            dict(logical_axis_rules={"a": [("mlp", 3)], "b": ()}, logical_axis_rules_name="b"),
            r"logical_axis_rules\['a'\].*\('mlp', 3\)",
        ),
        (dict(unmapped_logical_axes="ignore"), "unmapped_logical_axes.*'ignore'.*'error'"),
        (dict(stack_axis_names="layers"), r"stack_axis_names.*\('layers',\)"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_constructor(declared, message):
    with pytest.raises(ConfigError, match=message):
        WeightSharding(**declared)


def test_a_config_is_written_read_again_and_set():
    config = fdl.Config(
        dict,
        task=fdl.Config(
            dict,
            weight_sharding=fdl.Config(
                WeightSharding,
                strategy=[
                    (".*/up", 'logical_partitioning|fsdp("data", 0)'),
                    ("head", [fdl.Config(Fsdp, "data"), "replicate"]),
                ],
                logical_axis_rules={"tensor": RULES, "fsdp": [("embed", "data"), ("mlp", None)]},
                logical_axis_rules_name="tensor",
            ),
        ),
    )
    again = load_config(dump_config(config, "praxis_lite.experiments.lm.PyDocs")).config
    assert again == config
    assert fdl.build(again) == fdl.build(config)
    apply_overrides(
        again,
        [
            "task.weight_sharding.logical_axis_rules_name=fsdp",
            "task.weight_sharding.unmapped_logical_axes=replicate",
            "task.weight_sharding.strategy[0][1]=\"shard_dim('mdl', -1)\"",
        ],
    )
    built = fdl.build(again)["task"]["weight_sharding"]
    assert built.rules_in_use == (("embed", "data"), ("mlp", None))
    specs, _, _ = decide(strategy=built.strategy[:1], logical_axis_rules=RULES)
    assert specs["blocks/up"] == P(None, None, "mdl")
    with pytest.raises(ConfigError, match=r"unmapped_logical_axes.*'no'.*error, replicate"):
        apply_overrides(again, ["task.weight_sharding.unmapped_logical_axes=no"])


def test_flax_sees_the_rules_while_a_step_is_traced_and_not_after():
    with spmd.logical_axis_rules((("mine", "data"),)):
        with flax_axis_rules(WeightSharding(logical_axis_rules=[("mlp", ["data", "mdl"])])):
            assert spmd.get_logical_axis_rules() == (("mlp", ("data", "mdl")),)
        # Without rules the caller's stay.
        for none in (None, WeightSharding()):
            with flax_axis_rules(none):
                assert spmd.get_logical_axis_rules() == (("mine", "data"),)
    assert not spmd.get_logical_axis_rules()


def test_flaxs_rules_are_checked_where_a_mesh_is_set(mesh_of):
    # A Linen model is traced under them before its weights are known.
    unknown = WeightSharding(logical_axis_rules=[("mlp", "model")])
    with (
        jax.sharding.use_abstract_mesh(mesh_of(1, 4, 2).abstract_mesh),
        pytest.raises(ConfigError, match="'model'"),
        flax_axis_rules(unknown),
    ):
        raise AssertionError
    with flax_axis_rules(unknown):
        assert spmd.get_logical_axis_rules() == (("mlp", "model"),)


# B batch, D model, V vocabulary: none divides.
def init(key):
    keys = jax.random.split(key, 3)
    shapes = {"embedding": (37, 7), "blocks": (3, 7, 7), "head": (7, 37)}
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def loss(params, inputs, key):
    x_BD = params["embedding"][inputs["ids"]]
    x_BD = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x_BD, params["blocks"])[0]
    logits_BV = x_BD @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits_BV, inputs["labels"]).mean()


class Named(FunctionModel):
    """Its weights have logical names, as those of a Flax model."""

    names = {
        "embedding": ("vocab", "embed"),
        "blocks": ("layers", "embed", "mlp"),
        "head": ("embed", "vocab"),
    }

    def weight_specs(self):
        params = super().weight_specs()["params"]
        return {
            "non_trainable": {},
            "params": {
                path: dataclasses.replace(spec, logical_axes=self.names[path])
                for path, spec in params.items()
            },
        }


def task_of(model, optimizer=optax.adamw, **declared):
    weight_sharding = WeightSharding(**declared)
    return LossTask(model, loss, Learner(optimizer, 0.1), weight_sharding=weight_sharding)


NAMED = dict(logical_axis_rules=(("mlp", "mdl"), ("vocab", "data"), ("embed", None)))
RULED = dict(strategy=[("blocks", "shard_dim('mdl', 2)"), (".*", "fsdp('data', 0)")])


@functools.cache
def losses(one_device, named):
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1) if one_device else (1, 4, 2)))
    task = task_of(Named(init), **NAMED) if named else task_of(FunctionModel(init), **RULED)
    partitioner = Partitioner(task, mesh)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 37, 13).astype(np.int32) for name in ("ids", "labels")}
    key, actual = partitioner.key(0), []
    state = partitioner.init(key)
    for _ in range(3):
        state, outputs = partitioner.train_step(state, partitioner.global_batch(batch), key)
        actual.append(float(outputs["metrics"]["loss"][0]))
    return actual


@pytest.mark.slow
def test_names_and_rules_end_in_the_same_padded_layout_and_the_losses_of_one_device():
    layouts = [
        layout_and_learner(task, AXIS_SIZES)[0]
        for task in (task_of(Named(init), **NAMED), task_of(FunctionModel(init), **RULED))
    ]
    for layout in layouts:
        actual = {x.path: x for x in layout.leaves() if x.path.startswith("mdl_vars")}
        shapes = {path: (x.padded_shape, x.spec) for path, x in actual.items()}
        assert shapes == {
            "mdl_vars/params/embedding": ((40, 7), P("data", None)),
            "mdl_vars/params/blocks": ((3, 7, 8), P(None, None, "mdl")),
            "mdl_vars/params/head": ((7, 40), P(None, "data")),
        }
        assert all(x.declared_by for x in actual.values())
    assert actual["mdl_vars/params/head"].declared_by.startswith("rule '.*': fsdp('data'")
    expected = losses(one_device=True, named=False)
    for named in (False, True):
        np.testing.assert_allclose(losses(one_device=False, named=named), expected, atol=1e-5)
    assert expected[-1] < expected[0]


def test_an_optimizer_sees_one_layer_of_a_stack_that_names_tell():
    adafactor = functools.partial(optax.adafactor, min_dim_size_to_factor=3)

    def slots(model, **declared):
        layout = layout_and_learner(task_of(model, adafactor, **declared), AXIS_SIZES)[0]
        return {leaf.path: leaf.shape for leaf in layout.leaves() if "/v_row/blocks" in leaf.path}

    ((path, shape),) = slots(Named(init), **NAMED).items()
    assert "stack_3" in path and shape == (3, 7)
    ((path, shape),) = slots(FunctionModel(init), **RULED).items()
    assert "unstacked" in path
