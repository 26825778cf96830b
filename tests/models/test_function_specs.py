"""Trees of specs for plain functions, alone and beside rules by path, case by case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite.core.sharding.devices.axis_types import abstract_mesh_of
from praxis_lite.models import FunctionModel
from tests.support.declared_splits import (
    ONE_DEVICE,
    batch_of,
    losses_of,
    partitioner_of,
    refused,
    splits_of,
    xent,
)

D, F, LAYERS = 7, 13, 3  # Model dims, hidden dims; no axis divides them.


def init(key):
    """Returns an MLP's params: a dict, a list in it, and stacked weights."""
    keys = jax.random.split(key, 3)
    up, down = (jax.random.normal(k, s) for k, s in zip(keys, ((D, F), (F, D)), strict=False))
    stack = 0.1 * jax.random.normal(keys[2], (LAYERS, D, D))
    return {"mlp": {"w": up, "b": jnp.zeros(F)}, "out": [down], "stack": stack}


def loss(params, inputs, key):
    def logits(x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])
        return jax.nn.relu(x @ params["mlp"]["w"] + params["mlp"]["b"][None]) @ params["out"][0]

    return xent(logits, inputs, key)


def rule(*pairs):
    return {"strategy": pairs}


def specs(**changes):
    """Returns a tree of specs that declares nothing but the changes."""
    return {"mlp": None, "out": None, "stack": None} | changes


FSDP, NONE = rule((".*", 'fsdp("data", 0)')), {}
WHOLE = {"mlp/w": (None, None), "mlp/b": (None,), "out/0": (None, None), "stack": (None,) * 3}
ALL = {"mlp/w": ("data", None), "mlp/b": ("data",), "out/0": ("data", None),
       "stack": ("data", None, None)}
# By case: the specs, the job's rules, the splits; weights that are not named are whole.
DECIDED = {
    "nothing": (None, NONE, {}),
    "PartitionSpec for all": (P("data"), NONE, ALL),
    "tuple for all": (("data",), NONE, ALL),
    "empty for all": (P(), NONE, {}),
    "a tree": (
        {"mlp": {"w": P("data", "mdl"), "b": ("mdl",)}, "out": [(None, "data")], "stack": P()},
        NONE, {"mlp/w": ("data", "mdl"), "mlp/b": ("mdl",), "out/0": (None, "data")},
    ),
    "a prefix": (specs(mlp=P("mdl")), NONE, {"mlp/w": ("mdl", None), "mlp/b": ("mdl",)}),
    "a prefix, a tuple": (specs(mlp=("mdl",)), NONE, {"mlp/w": ("mdl", None), "mlp/b": ("mdl",)}),
    "a prefix over a list": (specs(out=P(None, "mdl")), NONE, {"out/0": (None, "mdl")}),
    "a tuple over a list is its entries": (specs(out=(P("mdl"),)), NONE, {"out/0": ("mdl", None)}),
    "fewer entries than dims": (specs(stack=P(None, "mdl")), NONE, {"stack": (None, "mdl", None)}),
    "a stack's dim": (
        specs(stack=("data", None, "mdl")), NONE, {"stack": ("data", None, "mdl")}
    ),
    "several axes of a dim": (
        specs(stack=(None, ("data", "mdl"))), NONE, {"stack": (None, ("data", "mdl"), None)}
    ),
    "a list of axes": (
        specs(stack=(None, ["data", "mdl"])), NONE, {"stack": (None, ("data", "mdl"), None)}
    ),
    "indices": (specs(stack=(-1, 1, 2)), NONE, {"stack": (None, "data", "mdl")}),
    "a function": (
        lambda shapes: jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "mdl"), shapes), NONE,
        {"mlp/w": (None, "mdl"), "mlp/b": ("mdl",), "out/0": (None, "mdl"),
         "stack": (None, None, "mdl")},
    ),
    "a function of a prefix": (lambda shapes: specs(mlp=P("mdl")), NONE,
                               {"mlp/w": ("mdl", None), "mlp/b": ("mdl",)}),
    # Rules start from the specs; a spec of () is whole, and free for them.
    "fsdp of all": (
        None, FSDP, {"mlp/w": (None, "data"), "mlp/b": ("data",), "out/0": ("data", None),
                     "stack": (None, None, "data")},
    ),
    "fsdp beside specs": (
        specs(mlp=P("mdl"), stack=(None, None, "mdl")), rule((".*w|stack", 'fsdp("data", 0)')),
        {"mlp/w": ("mdl", "data"), "mlp/b": ("mdl",), "stack": (None, "data", "mdl")},
    ),
    "fsdp over ()": (specs(mlp=()), rule(("mlp/w", 'fsdp("data", 0)')),
                     {"mlp/w": (None, "data")}),
    "a rule for the stack's dim": (
        specs(stack=(None, "mdl")), rule(("stack", 'shard_dim("data", 0)')),
        {"stack": ("data", "mdl", None)},
    ),
    "the first pattern": (
        specs(mlp={"w": P("mdl"), "b": None}),
        rule(("mlp/.*", 'shard_dim("data", -1, True)'), (".*", 'fsdp("data", 0)')),
        {"mlp/w": ("mdl", "data"), "out/0": ("data", None), "stack": (None, None, "data")},
    ),
    "replicate what is whole": (specs(mlp=(None,)), rule((".*", "replicate")), {}),
    "names of none": (specs(mlp=P("mdl")), rule((".*", "logical_partitioning")),
                      {"mlp/w": ("mdl", None), "mlp/b": ("mdl",)}),
}


@pytest.mark.parametrize("case", DECIDED)
def test_params_split_as_the_specs_and_the_rules_say(case):
    tree, declared, expected = DECIDED[case]
    assert splits_of(FunctionModel(init, tree), **declared) == WHOLE | expected


MESH_OF_ONE = abstract_mesh_of((1,), ("data",))
WRONG = {
    "no entry": ({"mlp": None, "out": None}, NONE, ["'stack'", "None declares nothing"]),
    "an entry of a part is missing": (specs(mlp={"w": P("mdl")}), NONE, ["'mlp/b'", "Add one"]),
    "an entry too many": (specs(head=None), NONE, ["'head'", "'mlp', 'out', 'stack'"]),
    "a NamedSharding": (
        specs(stack=NamedSharding(MESH_OF_ONE, P("data"))), NONE,
        ["NamedSharding", "'stack'", "expected a PartitionSpec"],
    ),
    "a list for a spec": (specs(stack=["data"]), NONE, ["['data']", "'stack'", "a tuple of mesh"]),
    "a string": (specs(stack="data"), NONE, ["'data'", "'stack'", "a tuple of mesh axes"]),
    "more entries than dims": (
        specs(mlp=P("data", "mdl")), NONE, ["mlp/b", "('data', 'mdl')", "Remove 1"]
    ),
    "an unknown axis": (specs(stack=P("date")), NONE, ["stack", "'date'", "Did you mean data"]),
    "an axis twice": (specs(stack=P("mdl", "mdl")), NONE, ["stack", "'mdl' twice"]),
    "unconstrained": (specs(stack=P(P.UNCONSTRAINED)), NONE, ["stack", "UNCONSTRAINED", "None"]),
    "a rule for the same dim": (
        specs(stack=P("data")), rule(("stack", 'shard_dim("mdl", 0)')),
        ["stack: shard_dim('mdl', 0)", "data splits already", "Choose another dim"],
    ),
    "a rule's axis is the spec's": (
        specs(stack=P("data")), rule(("stack", 'fsdp("data", 0)')), ["stack", "'data' twice"]
    ),
    "replicate what is split": (
        specs(stack=P("data")), rule((".*", "replicate")), ["stack: `replicate`", "Remove one"]
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_was_found_and_wanted(case):
    tree, declared, words = WRONG[case]
    with refused(words):
        partitioner_of(FunctionModel(init, tree), **declared)


@pytest.mark.slow
def test_split_so_a_model_trains_as_on_one_device():
    tree, declared, _ = DECIDED["fsdp beside specs"]
    actual, expected = (
        losses_of(FunctionModel(init, tree), loss, batch_of(11, D), *shape, **declared)
        for shape in ((), (ONE_DEVICE,))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual[1] < actual[0]
