"""Presets beside mappings of layers, templates and --set: who decides, case by case."""

import copy
import functools

import fiddle as fdl
import flax.nnx as nnx
import pytest

from praxis_lite import layers
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.layers import SHARDING_PRESETS, BaseLayer, set_sharding_params, splits
from tests.support.declared_splits import CasesOfRules, refused, splits_of

D, F, N = 12, 20, 4
MEGATRON = SHARDING_PRESETS["megatron"]
MAPPING = "weight_split_dims_mapping"


class Own(layers.Linear):
    """A user's layer with a name of its own."""

    splits = splits(weight=("embed", "own"), activation=())


class Outer(BaseLayer):
    """A user's layer that says its dims and hands them to a template."""

    splits = splits(weight=("embed", "own"))
    template_splits = {"head_tpl": layers.splits(weight=("vocab", "embed"))}

    def __init__(self, *, inner_tpl=layers.Linear, head_tpl=layers.Linear, rngs: nnx.Rngs):
        dims, (V, D_out) = self.dims(D, F), (F, D)
        self.inner = inner_tpl(*dims, rngs=rngs)
        self.head = head_tpl(V, D_out, rngs=rngs)


def feed_forward(**settings):
    return fdl.Partial(layers.TransformerFeedForward, D, F, has_bias=False, **settings)


def attention(**settings):
    return fdl.Partial(layers.DotProductAttention, D, N, use_bias=False, **settings)


def preset(config, name="fsdp+tensor", sets=(), **own):
    """Returns the config after a preset, then settings of its own and --set."""
    held = fdl.Config(dict, layer=set_sharding_params(copy.deepcopy(config), name))
    for setting, value in own.items():
        setattr(held.layer, setting, value)
    apply_overrides(held, [f"layer.{text}" for text in sets])
    return fdl.build(held.layer)


COMBINED = fdl.Partial(layers.AttentionProjection, attention_combine_dims=True)
# Its output dims are whole, whatever calls it says.
TEMPLATE = fdl.Partial(layers.FeedForward, weight_split_dims_mapping=("data", None))
IN, OUT = "ffn_layer1/linear/w", "ffn_layer2/linear/w"
FSDP = {"strategy": [(".*", 'fsdp("replica", 0)')]}
# By case: the layer after its preset, rules by path, the splits of some weights. What a mapping by
# name does in layers of each kind is tested in layers/test_split_cases.py.
DECIDED = {
    "preset": (preset(feed_forward()), {}, {IN: ("data", "mdl"), OUT: ("mdl", "data")}),
    "preset over a mapping": (
        preset(feed_forward(weight_split_dims_mapping=("mdl", "data")), "megatron"),
        {},
        {IN: (None, "mdl")},
    ),
    "a mapping by name after it": (
        preset(feed_forward(), weight_split_dims_mapping={"mlp": "data"}),
        {},
        {IN: (None, "data")},
    ),
    "a mapping by position after it": (
        preset(feed_forward(), weight_split_dims_mapping=("mdl",)),
        {},
        {OUT: (None, "mdl")},
    ),
    "no mapping after it": (
        preset(feed_forward(), weight_split_dims_mapping=None),
        {},
        {IN: (None, None)},
    ),
    "a second preset": (
        preset(set_sharding_params(feed_forward(), "fsdp"), "megatron"),
        {},
        {IN: (None, "mdl")},
    ),
    "an empty preset is a decision": (
        preset(feed_forward(weight_split_dims_mapping=("data",)), {}),
        {},
        {IN: (None, None)},
    ),
    "rules start from a preset": (
        preset(feed_forward(), "megatron"),
        FSDP,
        {IN: ("replica", "mdl"), OUT: ("mdl", "replica")},
    ),
    "a template's own mapping": (
        preset(feed_forward(fflayer_tpl=TEMPLATE), "megatron"),
        {},
        {IN: ("data", None), OUT: ("data", None)},
    ),
    # --set, by position, by name, of one entry.
    "--set by position": (
        preset(feed_forward(), sets=[f"{MAPPING}=None,data"]),
        {},
        {IN: (None, "data")},
    ),
    "--set by name": (
        preset(feed_forward(), sets=[f"{MAPPING}={{'mlp': ('data', 'mdl')}}"]),
        {},
        {IN: (None, ("data", "mdl"))},
    ),
    "--set of an entry": (
        preset(feed_forward(), sets=[f"{MAPPING}[0]=None"]),
        {},
        {IN: (None, "mdl")},
    ),
    "--set of a name": (
        preset(
            feed_forward(),
            sets=[f"{MAPPING}['mlp']=data"],
            weight_split_dims_mapping={"mlp": "mdl"},
        ),
        {},
        {IN: (None, "data")},
    ),
    "--set of none": (preset(feed_forward(), sets=[f"{MAPPING}=none"]), {}, {IN: (None, None)}),
    "a projection's own mapping": (
        preset(attention(proj_tpl=fdl.copy_with(COMBINED, weight_split_dims_mapping=("mdl",)))),
        {},
        {"query/w": ("mdl", None)},
    ),
    # Adapters, in templates and around layers; stacks.
    "adapters": (
        preset(fdl.Partial(layers.adapted, base_tpl=feed_forward(), rank=2)),
        {},
        {"ffn_layer1/linear/lora_a": ("data", None), "ffn_layer1/linear/lora_b": (None, "mdl")},
    ),
    "a stack, --set by name": (
        preset(
            fdl.Partial(layers.Repeat, feed_forward(), 3),
            sets=[f"block.{MAPPING}={{'mlp': 'data'}}"],
        ),
        {},
        {f"blocks/{OUT}": (None, "data", None)},
    ),
    # Layers of users: their names, what they hand on, what they say of a template.
    "a user's name": (preset(fdl.Partial(Own, D, F), {"own": "mdl"}), {}, {"w": (None, "mdl")}),
    "dims handed on": (
        preset(fdl.Partial(Outer), {"own": "mdl", "embed": "data"}),
        {},
        {"inner/w": ("data", "mdl")},
    ),
    "a template's names before the user's": (
        preset(fdl.Partial(Outer, inner_tpl=fdl.Partial(Own)), {"own": "mdl"}),
        {},
        {"inner/w": (None, "mdl")},
    ),
    "what a user says of a template": (
        preset(
            fdl.Partial(Outer, head_tpl=fdl.Partial(layers.Linear)), {"vocab": "mdl", "own": "mdl"}
        ),
        {},
        {"head/w": ("mdl", None), "inner/w": (None, "mdl")},
    ),
    "a template's own mapping, --set by position": (
        preset(
            fdl.Partial(Outer, inner_tpl=fdl.Partial(layers.Linear)),
            {"own": "mdl"},
            sets=[f"inner_tpl.{MAPPING}=data,"],
        ),
        {},
        {"inner/w": ("data", None)},
    ),
}
SPLITS = CasesOfRules(splits_of, DECIDED)


@pytest.mark.parametrize("case", DECIDED)
def test_a_weight_splits_as_the_last_word_says(case):
    actual, expected = SPLITS.of(case), DECIDED[case][-1]
    assert {path: actual[path] for path in expected} == expected


WRONG = {
    "an unknown name": (
        functools.partial(preset, feed_forward(), sets=[f"{MAPPING}={{'mpl': 'mdl'}}"]),
        ["TransformerFeedForward.weight_split_dims_mapping", "'mpl'", "Did you mean mlp?"],
    ),
    "a name without brackets": (
        functools.partial(preset, feed_forward(), sets=[f"{MAPPING}=mdl"]),
        [f"layer.{MAPPING}", "'mdl'", "write a sequence of one item as mdl,"],
    ),
    "a name of a user's dim": (
        functools.partial(preset, feed_forward(), {"onw": "mdl"}),
        ["'onw'", "own"],
    ),
    "one axis for two names": (
        functools.partial(preset, fdl.Partial(Own, D, F), {"own": "mdl", "embed": ("data", "mdl")}),
        ["Own.weight_split_dims_mapping", "'embed'", "'own'", "'mdl'"],
    ),
    "an axis twice after it": (
        functools.partial(preset, feed_forward(), sets=[f"{MAPPING}[0]=mdl"]),
        [IN, "'mdl' twice"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_says_what_was_found_and_wanted(case):
    make, words = WRONG[case]
    with refused(words):
        splits_of(make())


def test_a_mapping_by_name_is_written_and_read_again():
    config = fdl.Config(dict, layer=feed_forward(weight_split_dims_mapping={"mlp": ("mdl",)}))
    again = load_config(dump_config(config, "praxis_lite.experiments.lm.PyDocs")).config
    assert again == config
    assert splits_of(fdl.build(again.layer))[IN] == (None, "mdl")
