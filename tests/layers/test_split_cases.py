"""Layers' own mappings, dims of parents and a job's rules by path: who decides, case by case."""

import functools

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Fsdp, ShardDim
from praxis_lite.layers import (
    AttentionProjection,
    BaseLayer,
    DotProductAttention,
    FeedForward,
    FullSoftmax,
    Linear,
    MultiHeadLatentAttention,
    Pipeline,
    Repeat,
    SharedEmbeddingSoftmax,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    lora,
    splits,
)
from praxis_lite.layers.base.dims import Dim
from tests.support.declared_splits import (
    CasesOfRules,
    refused,
    splits_of,
)

# D model dims, F hidden dims, N heads; D and F are not divisible by any mesh axis.
D, F, N = 7, 13, 4


def made(layer, *sizes, **settings):
    return lambda rngs: layer(*sizes, **settings, rngs=rngs)


def feed_forward(mapping=None, **settings):
    settings |= {} if mapping is None else {"weight_split_dims_mapping": mapping}
    return made(TransformerFeedForward, D, F, has_bias=False, **settings)


def attention(mapping=None, **settings):
    settings |= {} if mapping is None else {"weight_split_dims_mapping": mapping}
    return made(DotProductAttention, 8, N, use_bias=False, **settings)


def linear(mapping=None, dims=(D, F)):
    settings = {} if mapping is None else {"weight_split_dims_mapping": mapping}
    return made(Linear, *dims, **settings)


def repeated(make, **settings):
    return lambda rngs: Repeat(lambda rngs: make(rngs), 4, rngs=rngs, **settings)


def piped(make, **settings):
    return lambda rngs: Pipeline(
        lambda rngs: make(rngs), 4, num_stages=2, num_microbatches=2, rngs=rngs, **settings
    )


def adapted(make, only=None):
    return lambda rngs: lora(lambda rngs: make(rngs), rank=3, only=only)(rngs=rngs)


def rule(*pairs, **settings):
    return {"strategy": pairs, **settings}


COMBINED = functools.partial(AttentionProjection, attention_combine_dims=True)
IN, OUT = "ffn_layer1/linear/w", "ffn_layer2/linear/w"
OWN_LINEAR = functools.partial(
    FeedForward, linear_tpl=functools.partial(Linear, weight_split_dims_mapping=("data", None))
)
EMBED, WHOLE = Dim(D, "embed", "data"), Dim(D, "embed", is_explicit=True)
# By case: the layer, and the splits of some of its weights.
DECIDED = {
    # By position or by name; a dim that is not said is whole, the rest as if it were transposed.
    "by position": (
        feed_forward(("data", "mdl")),
        {IN: ("data", "mdl"), OUT: ("mdl", "data")},
    ),
    "short": (feed_forward(("data",)), {IN: ("data", None), OUT: (None, "data")}),
    "by name": (feed_forward({"mlp": "mdl"}), {IN: (None, "mdl"), OUT: ("mdl", None)}),
    "by name, two axes": (
        feed_forward({"mlp": ["data", "mdl"]}),
        {IN: (None, ("data", "mdl"))},
    ),
    "by name, by index": (feed_forward({"mlp": 2, "embed": -1}), {IN: (None, "mdl")}),
    "by name, nothing": (feed_forward({}), {IN: (None, None)}),
    "PartitionSpec": (feed_forward(P(None, "mdl")), {OUT: ("mdl", None)}),
    "negative index": (feed_forward((-1, 2)), {IN: (None, "mdl")}),
    # A template's own mapping comes before that of the layer that calls it.
    "a template's": (
        feed_forward(
            ("data", "mdl"),
            fflayer_tpl=functools.partial(FeedForward, weight_split_dims_mapping=(None, "replica")),
        ),
        {IN: (None, "replica"), OUT: (None, "replica")},
    ),
    "a template's template's": (
        feed_forward({"mlp": "mdl"}, fflayer_tpl=OWN_LINEAR),
        {IN: ("data", None), OUT: ("data", None)},
    ),
    # Dims that a parent gives.
    "a parent's dim": (linear(dims=(EMBED, F)), {"w": ("data", None)}),
    "a parent's whole dim": (linear(dims=(WHOLE, F)), {"w": (None, None)}),
    "a parent's dims": (linear(dims=(EMBED, Dim(F, "x", "mdl"))), {"w": ("data", "mdl")}),
    "own over a parent's": (linear(("mdl",), dims=(EMBED, F)), {"w": ("mdl", None)}),
    "own of None over a parent's": (linear((), dims=(EMBED, F)), {"w": (None, None)}),
    "by name over a parent's": (
        made(
            TransformerFeedForward,
            EMBED,
            Dim(F, "wide", "mdl"),
            has_bias=False,
            weight_split_dims_mapping={"mlp": "replica"},
        ),
        {IN: (None, "replica"), OUT: ("replica", None)},
    ),
    "biases of a parent's dims": (
        made(FeedForward, D, Dim(F, "mlp", "mdl")),
        {"linear/w": (None, "mdl"), "bias/b": ("mdl",)},
    ),
    # Heads: of keys as of queries, one is whole; merged dims have the axes of both.
    "fewer heads of keys": (
        attention({"heads": "mdl"}, num_kv_heads=2),
        {"query/w": (None, "mdl", None), "key/w": (None, "mdl", None)},
    ),
    "one head of keys": (
        attention({"heads": "mdl", "head_dim": "data"}, num_kv_heads=1),
        {"post/w": (None, "mdl", "data"), "key/w": (None, "data"), "value/w": (None, "data")},
    ),
    "merged": (
        attention({"heads": "mdl", "head_dim": "data"}, proj_tpl=COMBINED),
        {"query/w": (None, ("mdl", "data")), "post/w": (None, ("mdl", "data"))},
    ),
    "merged, a negative index": (
        attention({"heads": "mdl", "head_dim": -1}, proj_tpl=COMBINED),
        {"key/w": (None, "mdl")},
    ),
    "merged, embed alone": (
        attention({"embed": ("data", "mdl")}, proj_tpl=COMBINED, num_kv_heads=2),
        {"key/w": (("data", "mdl"), None)},
    ),
    "outputs as [N, K, D]": (
        attention(("data", "mdl"), output_proj_use_nhd_shape=True),
        {"query/w": ("data", "mdl", None), "post/w": ("mdl", None, "data")},
    ),
    "one weight of three": (
        attention(("data", "mdl"), combine_qkv=True),
        {"combined_qkv/w": (None, "data", "mdl", None)},
    ),
    "latents": (
        made(
            MultiHeadLatentAttention,
            8,
            N,
            kv_lora_rank=6,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=3,
            weight_split_dims_mapping={"embed": "data", "heads": "mdl"},
        ),
        {"query/w": ("data", "mdl", None), "key_value_latent/w": ("data", None)},
    ),
    "experts and router": (
        made(
            TransformerFeedForwardMoe,
            D,
            F,
            num_experts=4,
            weight_split_dims_mapping={"expert": "data", "mlp": "mdl"},
            gate_split_dims_mapping={"embed": "replica"},
        ),
        {"wi_0": ("data", None, "mdl"), "wo_0": ("data", "mdl", None), "gate": ("replica", None)},
    ),
    "classes of parents' dims": (
        made(FullSoftmax, Dim(37, "vocab", "mdl"), EMBED),
        {"logits_ffn/linear/w": ("data", "mdl"), "logits_ffn/bias/b": ("mdl",)},
    ),
    # Adapters split as the dims that they share with the weight; the rank is whole.
    "adapter": (
        adapted(linear(("data", "mdl"))),
        {"w": ("data", "mdl"), "lora_a": ("data", None), "lora_b": (None, "mdl")},
    ),
    "adapter of merged dims": (
        adapted(attention({"heads": "mdl"}, proj_tpl=COMBINED), only=("query", "post")),
        {"query/lora_b": (None, "mdl", None), "post/lora_a": ("mdl", None, None)},
    ),
    "adapter of a parent's dims": (
        adapted(linear(dims=(EMBED, F))),
        {"lora_a": ("data", None), "lora_b": (None, None)},
    ),
    # Stacks put their dims in front.
    "Repeat": (
        repeated(feed_forward({"mlp": "mdl"}), stack_split="data"),
        {f"blocks/{IN}": ("data", None, "mdl")},
    ),
    "Repeat of adapters": (
        repeated(adapted(feed_forward({"mlp": "mdl"}))),
        {"blocks/ffn_layer1/linear/lora_b": (None, None, "mdl")},
    ),
    "Repeat in Repeat": (
        repeated(repeated(feed_forward(P(None, "mdl")), stack_split="replica"), stack_split=1),
        {f"blocks/blocks/{IN}": ("data", "replica", None, "mdl")},
    ),
    "unrolled": (
        repeated(feed_forward({"mlp": "mdl"}), unroll=True),
        {f"blocks/3/{OUT}": ("mdl", None)},
    ),
    "Pipeline": (
        piped(feed_forward({"mlp": "mdl"}), stage_axis="data"),
        {f"blocks/{IN}": (None, "data", None, None, "mdl")},
    ),
    "Pipeline without an axis": (
        piped(feed_forward({"embed": "data"}), stage_axis=None),
        {f"blocks/{OUT}": (None, None, None, None, "data")},
    ),
}
FSDP = rule((".*", 'fsdp("data", 0)'))

# By case: the layer, the job's rules, and the splits of some of its weights.
RULED = {
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
CASES = {
    **{name: (make, {}, expected) for name, (make, expected) in DECIDED.items()},
    **{f"rules: {name}": case for name, case in RULED.items()},
}
SPLITS = CasesOfRules(splits_of, CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_weight_splits_as_its_layer_a_parent_and_rules_say(case):
    actual, expected = SPLITS.of(case), CASES[case][-1]
    assert {path: actual[path] for path in expected} == expected


class TooFewNames(BaseLayer):
    """A user's layer that names one dim of two."""

    splits = splits(weight=("embed",))

    def __init__(self, of="weight", *, rngs):
        self.w = self.weight(self.dims(D, F, setting_prefix=of), rngs=rngs)


OF_FEED_FORWARD = "TransformerFeedForward.weight_split_dims_mapping"
WRONG = {
    "by an unknown name": (feed_forward({"mpl": "mdl"}), [OF_FEED_FORWARD, "'mpl'", "mlp?"]),
    "by name, of none": (linear({"mlp": "mdl"}), ["Linear.weight_split", "a sequence"]),
    "by name, no axis": (feed_forward({"mlp": 0.5}), [IN, "0.5", "'mdl'", "an index"]),
    "by name, an axis twice": (
        feed_forward({"mlp": "mdl", "embed": "mdl"}),
        [IN, "'mdl' twice"],
    ),
    "merged, an axis twice": (
        attention({"heads": "mdl", "head_dim": "mdl"}, proj_tpl=COMBINED),
        ["key/w", "'mdl' twice"],
    ),
    "a parent's axis once more": (
        linear(dims=(EMBED, Dim(F, "mlp", "data"))),
        ["w: split dims", "'data' twice"],
    ),
    "the stack's axis once more": (
        repeated(feed_forward({"mlp": "mdl"}), stack_split="mdl"),
        [IN, "'mdl' twice"],
    ),
    "names for half of the dims": (
        made(TooFewNames),
        [
            "TooFewNames.weight_split_dims_mapping",
            "('embed',)",
            f"({D}, {F})",
            "one name per dim",
        ],
    ),
    "dims of no setting": (
        made(TooFewNames, "gate"),
        ["TooFewNames", "gate_split_dims_mapping", "expected"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_was_found_and_wanted(case):
    make, words = WRONG[case]
    with refused(words):
        splits_of(make)


WRONG_RULES = {
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


@pytest.mark.parametrize("case", WRONG_RULES)
def test_a_rule_that_does_not_fit_says_what_was_found_and_wanted(case):
    make, rules, words = WRONG_RULES[case]
    with refused(words):
        splits_of(make, **rules)


def test_a_softmax_knows_the_split_of_its_weight_whoever_said_it():
    for layer in (FullSoftmax, SharedEmbeddingSoftmax):
        made_of_dims = made(layer, Dim(37, "vocab", "mdl"), EMBED)
        by_itself = made(layer, 37, D, weight_split_dims_mapping=("data", "mdl"))
        for make in (made_of_dims, by_itself):
            actual = make(nnx.Rngs(0)).weight_split_dims_mapping
            assert actual == ("data", "mdl")
