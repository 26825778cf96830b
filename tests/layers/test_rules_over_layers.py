"""A job's rules by path over layers that say how they split: who decides, case by case."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Fsdp, ShardDim
from praxis_lite.layers import BaseLayer, DotProductAttention, Repeat
from praxis_lite.layers.base.dims import Dim
from tests.support.declared_splits import (
    ONE_DEVICE,
    CasesOfRules,
    batch_of,
    losses_of,
    refused,
    splits_of,
    xent,
)
from tests.support.split_layers import (
    COMBINED,
    IN,
    OUT,
    D,
    F,
    N,
    adapted,
    attention,
    feed_forward,
    linear,
    repeated,
    rule,
)

FSDP = rule((".*", 'fsdp("data", 0)'))
EMBED = Dim(D, "embed", "data")
# By case: the layer, the job's rules, and the splits of some of its weights.
DECIDED = {
    # Rules start from what a layer says, whole dims are free for them.
    "fsdp of a silent layer": (feed_forward(), FSDP, {IN: (None, "data"), OUT: ("data", None)}),
    "fsdp beside its mapping": (
        feed_forward({"mlp": "mdl"}),
        FSDP,
        {IN: ("data", "mdl"), OUT: ("mdl", "data")},
    ),
    "fsdp of a whole layer": (feed_forward(()), FSDP, {IN: (None, "data")}),
    "fsdp where it is split": (
        feed_forward({"embed": ("data", "mdl")}),
        rule((f".*{IN}", 'fsdp("replica", 0)')),
        {IN: (("data", "mdl"), "replica"), OUT: (None, ("data", "mdl"))},
    ),
    "fsdp leaves small ones": (
        feed_forward({"mlp": "mdl"}),
        rule((".*", 'fsdp("data", min_weight_size=90)')),
        {IN: ("data", "mdl"), "layer_norm/scale": (None,)},
    ),
    "the first pattern": (
        feed_forward({"mlp": "mdl"}),
        rule((f".*{IN}", 'shard_dim("data", 0)'), (".*", 'fsdp("replica", 0)')),
        {IN: ("data", "mdl"), OUT: ("mdl", "replica")},
    ),
    "replicate before": (
        feed_forward(),
        rule((f".*{IN}|.*norm.*", "replicate"), (".*", 'fsdp("data", 0)')),
        {IN: (None, None), OUT: ("data", None), "layer_norm/scale": (None,)},
    ),
    "no names to go by": (
        feed_forward({"mlp": "mdl"}),
        rule((".*", "logical_partitioning"), logical_axis_rules=(("embed", "data"),)),
        {IN: (None, "mdl")},
    ),
    "fsdp of a stack": (
        repeated(feed_forward({"mlp": "mdl"})),
        FSDP,
        {f"blocks/{IN}": (None, "data", "mdl")},
    ),
    "a rule for the stack's dim": (
        repeated(feed_forward({"mlp": "mdl"})),
        rule((f".*{IN}", 'shard_dim("data", 0)')),
        {f"blocks/{IN}": ("data", None, "mdl"), f"blocks/{OUT}": (None, "mdl", None)},
    ),
    "a rule for one of the unrolled": (
        repeated(feed_forward({"mlp": "mdl"}), unroll=True),
        rule((f".*blocks/0/{IN}", 'shard_dim("data", 0)')),
        {f"blocks/0/{IN}": ("data", "mdl"), f"blocks/1/{IN}": (None, "mdl")},
    ),
    "adapter by rule": (
        adapted(linear(dims=(8, 16))),
        FSDP,
        {"w": (None, "data"), "lora_a": ("data", None), "lora_b": (None, "data")},
    ),
    "objects for strings": (
        feed_forward({"mlp": "mdl"}),
        rule((f".*{OUT}", [Fsdp("data", 0)]), (f".*{IN}", ShardDim("replica", 0))),
        {IN: ("replica", "mdl"), OUT: ("mdl", "data")},
    ),
    "a rule after a rule": (
        feed_forward(),
        rule((f".*{IN}", ['shard_dim("mdl", -1)', 'fsdp("data", 0)'])),
        {IN: ("data", "mdl"), OUT: (None, None)},
    ),
    "two axes of a dim": (
        feed_forward({"embed": "replica"}),
        rule((".*ffn.*", 'fsdp(("data", "mdl"), 0)')),
        {IN: ("replica", ("data", "mdl")), OUT: (("data", "mdl"), "replica")},
    ),
    "no dim of that number": (
        feed_forward({"mlp": "mdl"}),
        rule((".*", 'shard_dim("data", 2, ignore_ndim_error=True)')),
        {IN: (None, "mdl")},
    ),
    "what does not divide stays whole": (
        feed_forward({"mlp": "mdl"}),
        rule((".*", 'fsdp("data", 0)'), allow_padding=False),
        {IN: (None, "mdl")},
    ),
    "heads and a rule": (
        attention({"heads": "mdl"}),
        rule((".*key/w", 'fsdp("data", 0)')),
        {"key/w": ("data", "mdl", None), "query/w": (None, "mdl", None)},
    ),
    "merged dims": (
        attention({"heads": "mdl"}, proj_tpl=COMBINED),
        rule((".*/w", 'fsdp("data", 0)')),
        {"query/w": ("data", "mdl")},
    ),
    "a parent's dims": (
        linear(dims=(EMBED, F)),
        rule((".*", 'fsdp("mdl", 0)')),
        {"w": ("data", "mdl")},
    ),
}
SPLITS = CasesOfRules(splits_of, DECIDED)


@pytest.mark.parametrize("case", DECIDED)
def test_rules_split_what_the_layers_leave_whole(case):
    actual, expected = SPLITS.of(case), DECIDED[case][-1]
    assert {path: actual[path] for path in expected} == expected


WRONG = {
    "replicate what is split": (
        feed_forward({"mlp": "mdl"}),
        rule((f".*{IN}", "replicate")),
        [IN, "`replicate`", "(None, 'mdl')"],
    ),
    "a rule for a dim that is split": (
        feed_forward({"mlp": "mdl"}),
        rule((f".*{IN}", 'shard_dim("data", 1)')),
        [IN, "shard_dim('data', 1)", "splits it over mdl", "Choose a different dim"],
    ),
    "a rule's axis is the layer's": (
        feed_forward({"mlp": "mdl"}),
        rule((".*ffn.*", 'fsdp("mdl", 0)')),
        [IN, "'mdl' twice"],
    ),
    "a pattern of a part": (
        feed_forward(),
        rule(("linear/w", "replicate")),
        ["'linear/w'", "'.*'", IN],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_was_found_and_wanted(case):
    make, rules, words = WRONG[case]
    with refused(words):
        splits_of(make, **rules)


class Stack(BaseLayer):
    """A model of parts that are split in many ways."""

    def __init__(self, *, rngs):
        self.blocks = Repeat(Block, 2, stack_split="replica", rngs=rngs)
        self.out = adapted(linear(P("data"), dims=(D, Dim(D, "vocab", "mdl"))))(rngs)

    def __call__(self, x):
        return self.out(self.blocks(x[:, None])[0][:, 0])


class Block(BaseLayer):
    """Merged dims with fewer heads of keys, and hidden dims by name."""

    def __init__(self, *, rngs):
        self.attention = DotProductAttention(
            D,
            N,
            dim_per_head=3,
            num_kv_heads=2,
            use_bias=False,
            proj_tpl=COMBINED,
            weight_split_dims_mapping={"heads": "mdl"},
            rngs=rngs,
        )
        self.ff = feed_forward({"mlp": "mdl"})(rngs)

    def __call__(self, x, *, cache=None, **inputs):
        return self.ff(x + self.attention(x)[0]), cache


@pytest.mark.slow
def test_split_so_a_model_trains_as_on_one_device():
    settings = rule((".*ffn.*", 'fsdp("data", 0)'))
    actual, expected = (
        losses_of(Stack, xent, batch_of(11, D), *shape, **settings) for shape in ((), (ONE_DEVICE,))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual[1] < actual[0]
