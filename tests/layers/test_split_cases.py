"""Layers' own mappings and dims of parents: who decides, case by case."""

import functools

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite.layers import (
    BaseLayer,
    FeedForward,
    FullSoftmax,
    Linear,
    MultiHeadLatentAttention,
    SharedEmbeddingSoftmax,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    splits,
)
from praxis_lite.layers.base.dims import Dim
from tests.support.declared_splits import CasesOfRules, refused, splits_of
from tests.support.split_layers import (
    COMBINED,
    IN,
    NONE,
    OUT,
    D,
    F,
    N,
    adapted,
    attention,
    feed_forward,
    linear,
    made,
    piped,
    repeated,
)

OWN_LINEAR = functools.partial(
    FeedForward, linear_tpl=functools.partial(Linear, weight_split_dims_mapping=("data", None))
)
EMBED, WHOLE = Dim(D, "embed", "data"), Dim(D, "embed", is_explicit=True)
# By case: the layer, no rules of the job, and the splits of some of its weights.
DECIDED = {
    # By position or by name; a dim that is not said is whole, the rest as if it were transposed.
    "by position": (
        feed_forward(("data", "mdl")),
        NONE,
        {IN: ("data", "mdl"), OUT: ("mdl", "data")},
    ),
    "short": (feed_forward(("data",)), NONE, {IN: ("data", None), OUT: (None, "data")}),
    "by name": (feed_forward({"mlp": "mdl"}), NONE, {IN: (None, "mdl"), OUT: ("mdl", None)}),
    "by name, two axes": (
        feed_forward({"mlp": ["data", "mdl"]}),
        NONE,
        {IN: (None, ("data", "mdl"))},
    ),
    "by name, by index": (feed_forward({"mlp": 2, "embed": -1}), NONE, {IN: (None, "mdl")}),
    "by name, nothing": (feed_forward({}), NONE, {IN: (None, None)}),
    "PartitionSpec": (feed_forward(P(None, "mdl")), NONE, {OUT: ("mdl", None)}),
    "negative index": (feed_forward((-1, 2)), NONE, {IN: (None, "mdl")}),
    # A template's own mapping comes before that of the layer that calls it.
    "a template's": (
        feed_forward(
            ("data", "mdl"),
            fflayer_tpl=functools.partial(FeedForward, weight_split_dims_mapping=(None, "replica")),
        ),
        NONE,
        {IN: (None, "replica"), OUT: (None, "replica")},
    ),
    "a template's template's": (
        feed_forward({"mlp": "mdl"}, fflayer_tpl=OWN_LINEAR),
        NONE,
        {IN: ("data", None), OUT: ("data", None)},
    ),
    # Dims that a parent gives.
    "a parent's dim": (linear(dims=(EMBED, F)), NONE, {"w": ("data", None)}),
    "a parent's whole dim": (linear(dims=(WHOLE, F)), NONE, {"w": (None, None)}),
    "a parent's dims": (linear(dims=(EMBED, Dim(F, "x", "mdl"))), NONE, {"w": ("data", "mdl")}),
    "own over a parent's": (linear(("mdl",), dims=(EMBED, F)), NONE, {"w": ("mdl", None)}),
    "own of None over a parent's": (linear((), dims=(EMBED, F)), NONE, {"w": (None, None)}),
    "by name over a parent's": (
        made(
            TransformerFeedForward,
            EMBED,
            Dim(F, "wide", "mdl"),
            has_bias=False,
            weight_split_dims_mapping={"mlp": "replica"},
        ),
        NONE,
        {IN: (None, "replica"), OUT: ("replica", None)},
    ),
    "biases of a parent's dims": (
        made(FeedForward, D, Dim(F, "mlp", "mdl")),
        NONE,
        {"linear/w": (None, "mdl"), "bias/b": ("mdl",)},
    ),
    # Heads: of keys as of queries, one is whole; merged dims have the axes of both.
    "fewer heads of keys": (
        attention({"heads": "mdl"}, num_kv_heads=2),
        NONE,
        {"query/w": (None, "mdl", None), "key/w": (None, "mdl", None)},
    ),
    "one head of keys": (
        attention({"heads": "mdl", "head_dim": "data"}, num_kv_heads=1),
        NONE,
        {"post/w": (None, "mdl", "data"), "key/w": (None, "data"), "value/w": (None, "data")},
    ),
    "merged": (
        attention({"heads": "mdl", "head_dim": "data"}, proj_tpl=COMBINED),
        NONE,
        {"query/w": (None, ("mdl", "data")), "post/w": (None, ("mdl", "data"))},
    ),
    "merged, a negative index": (
        attention({"heads": "mdl", "head_dim": -1}, proj_tpl=COMBINED),
        NONE,
        {"key/w": (None, "mdl")},
    ),
    "merged, embed alone": (
        attention({"embed": ("data", "mdl")}, proj_tpl=COMBINED, num_kv_heads=2),
        NONE,
        {"key/w": (("data", "mdl"), None)},
    ),
    "outputs as [N, K, D]": (
        attention(("data", "mdl"), output_proj_use_nhd_shape=True),
        NONE,
        {"query/w": ("data", "mdl", None), "post/w": ("mdl", None, "data")},
    ),
    "one weight of three": (
        attention(("data", "mdl"), combine_qkv=True),
        NONE,
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
        NONE,
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
        NONE,
        {"wi_0": ("data", None, "mdl"), "wo_0": ("data", "mdl", None), "gate": ("replica", None)},
    ),
    "classes of parents' dims": (
        made(FullSoftmax, Dim(37, "vocab", "mdl"), EMBED),
        NONE,
        {"logits_ffn/linear/w": ("data", "mdl"), "logits_ffn/bias/b": ("mdl",)},
    ),
    # Adapters split as the dims that they share with the weight; the rank is whole.
    "adapter": (
        adapted(linear(("data", "mdl"))),
        NONE,
        {"w": ("data", "mdl"), "lora_a": ("data", None), "lora_b": (None, "mdl")},
    ),
    "adapter of merged dims": (
        adapted(attention({"heads": "mdl"}, proj_tpl=COMBINED), only=("query", "post")),
        NONE,
        {"query/lora_b": (None, "mdl", None), "post/lora_a": ("mdl", None, None)},
    ),
    "adapter of a parent's dims": (
        adapted(linear(dims=(EMBED, F))),
        NONE,
        {"lora_a": ("data", None), "lora_b": (None, None)},
    ),
    # Stacks put their dims in front.
    "Repeat": (
        repeated(feed_forward({"mlp": "mdl"}), stack_split="data"),
        NONE,
        {f"blocks/{IN}": ("data", None, "mdl")},
    ),
    "Repeat of adapters": (
        repeated(adapted(feed_forward({"mlp": "mdl"}))),
        NONE,
        {"blocks/ffn_layer1/linear/lora_b": (None, None, "mdl")},
    ),
    "Repeat in Repeat": (
        repeated(repeated(feed_forward(P(None, "mdl")), stack_split="replica"), stack_split=1),
        NONE,
        {f"blocks/blocks/{IN}": ("data", "replica", None, "mdl")},
    ),
    "unrolled": (
        repeated(feed_forward({"mlp": "mdl"}), unroll=True),
        NONE,
        {f"blocks/3/{OUT}": ("mdl", None)},
    ),
    "Pipeline": (
        piped(feed_forward({"mlp": "mdl"}), stage_axis="data"),
        NONE,
        {f"blocks/{IN}": (None, "data", None, None, "mdl")},
    ),
    "Pipeline without an axis": (
        piped(feed_forward({"embed": "data"}), stage_axis=None),
        NONE,
        {f"blocks/{OUT}": (None, None, None, None, "data")},
    ),
}
SPLITS = CasesOfRules(splits_of, DECIDED)


@pytest.mark.parametrize("case", DECIDED)
def test_a_weight_splits_as_its_layer_and_a_parent_say(case):
    actual, expected = SPLITS.of(case), DECIDED[case][-1]
    assert {path: actual[path] for path in expected} == expected


class TooFewNames(BaseLayer):
    """A user's layer that names one dim of two."""

    splits = splits(weight=("embed",))

    def __init__(self, of="weight", *, rngs):
        self.w = self.weight(self.dims(D, F, setting_prefix=of), rngs=rngs)


OF_FEED_FORWARD = "TransformerFeedForward.weight_split_dims_mapping"
WRONG = {
    "by an unknown name": (feed_forward({"mpl": "mdl"}), NONE, [OF_FEED_FORWARD, "'mpl'", "mlp?"]),
    "by name, of none": (linear({"mlp": "mdl"}), NONE, ["Linear.weight_split", "a sequence"]),
    "by name, no axis": (feed_forward({"mlp": 0.5}), NONE, [IN, "0.5", "'mdl'", "an index"]),
    "by name, an axis twice": (
        feed_forward({"mlp": "mdl", "embed": "mdl"}),
        NONE,
        [IN, "'mdl' twice"],
    ),
    "merged, an axis twice": (
        attention({"heads": "mdl", "head_dim": "mdl"}, proj_tpl=COMBINED),
        NONE,
        ["key/w", "'mdl' twice"],
    ),
    "a parent's axis once more": (
        linear(dims=(EMBED, Dim(F, "mlp", "data"))),
        NONE,
        ["w: split dims", "'data' twice"],
    ),
    "the stack's axis once more": (
        repeated(feed_forward({"mlp": "mdl"}), stack_split="mdl"),
        NONE,
        [IN, "'mdl' twice"],
    ),
    "names for half of the dims": (
        made(TooFewNames),
        NONE,
        [
            "TooFewNames.weight_split_dims_mapping",
            "('embed',)",
            f"({D}, {F})",
            "one name per dim",
        ],
    ),
    "dims of no setting": (
        made(TooFewNames, "gate"),
        NONE,
        ["TooFewNames", "gate_split_dims_mapping", "expected"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_was_found_and_wanted(case):
    make, rules, words = WRONG[case]
    with refused(words):
        splits_of(make, **rules)


def test_a_softmax_knows_the_split_of_its_weight_whoever_said_it():
    for layer in (FullSoftmax, SharedEmbeddingSoftmax):
        made_of_dims = made(layer, Dim(37, "vocab", "mdl"), EMBED)
        by_itself = made(layer, 37, D, weight_split_dims_mapping=("data", "mdl"))
        for make in (made_of_dims, by_itself):
            actual = make(nnx.Rngs(0)).weight_split_dims_mapping
            assert actual == ("data", "mdl")
