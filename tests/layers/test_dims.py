"""Dims of weights: what a layer says of them, what a parent gives, and what a setting decides."""

import copy
import inspect
import pickle

import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.layers import (
    BaseLayer,
    DotProductAttention,
    FeedForward,
    Linear,
    TransformerFeedForward,
    splits,
)
from praxis_lite.layers.base.dims import Dim, merged_dim, sized, split_of


def splits_of(layer):
    """Returns the split of each weight by its path; None: nothing says how it splits."""
    return {
        "/".join(map(str, path)): leaf.get_metadata()["split_dims_mapping"]
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
        if leaf.get_metadata()["split_dims_mapping"] is not None
    }


def test_a_dim_is_its_size_and_knows_its_name_and_split_wherever_it_goes():
    dim = Dim(6, "mlp", "mdl", is_explicit=True)
    for same in (dim, copy.deepcopy(dim), pickle.loads(pickle.dumps(dim))):
        assert same == 6 and hash(same) == hash(6)
        assert (same.name, same.split, same.is_explicit) == ("mlp", "mdl", True)
    assert type(dim * 2) is int and type(int(dim)) is int
    assert sized(dim, 4) == 4 and sized(dim, 4).split == "mdl" and sized(5, 4) == 4
    both = merged_dim(dim, Dim(2, "head_dim", ("data",)))
    assert both == 12 and both.split == ("mdl", "data") and both.name == "mlp head_dim"
    assert merged_dim(dim) is dim and split_of((5, Dim(3))) is None


@pytest.mark.parametrize("mapping", [(None, "mdl"), [None, "mdl"], {"mlp": "mdl"}])
def test_a_mapping_is_by_position_or_by_name_and_reaches_every_layer_inside(mapping):
    layer = TransformerFeedForward(
        5, 7, use_gated_activation=True, weight_split_dims_mapping=mapping, rngs=nnx.Rngs(0)
    )
    assert splits_of(layer) == {
        "ffn_layer1/linear/w": (None, "mdl"),
        "ffn_layer1/bias/b": ("mdl",),
        "ffn_layer1_gate/linear/w": (None, "mdl"),
        "ffn_layer1_gate/bias/b": ("mdl",),
        "ffn_layer2/linear/w": ("mdl", None),
        "ffn_layer2/bias/b": (None,),
    }


def test_a_layers_own_mapping_is_before_its_parents_and_a_parents_name_before_its_own():
    dims = (Dim(5, "embed", "data", is_explicit=True), Dim(7, "own", is_explicit=True))
    assert splits_of(Linear(*dims, rngs=nnx.Rngs(0))) == {"w": ("data", None)}
    layer = Linear(*dims, weight_split_dims_mapping=("mdl",), rngs=nnx.Rngs(0))
    assert splits_of(layer) == {"w": ("mdl", None)}
    assert layer.w.get_metadata()["dim_names"] == ("embed", "own")
    layer = TransformerFeedForward(*dims, rngs=nnx.Rngs(0))
    assert layer.ffn_layer1.linear.w.get_metadata()["dim_names"] == ("embed", "own")
    assert not splits_of(FeedForward(5, 7, rngs=nnx.Rngs(0)))


class _Undeclared(BaseLayer):
    splits = splits(weight=("embed",), activation=())

    def __init__(self, size, *, rngs):
        self.given = None
        self.w = self.weight(self.dims(size), rngs=rngs)


class _Declared(_Undeclared):
    def __init__(self, size, *, rngs, weight_split_dims_mapping=None):
        super().__init__(size, rngs=rngs)
        self.given = weight_split_dims_mapping


@pytest.mark.parametrize("layer_class", [_Undeclared, _Declared])
def test_a_constructor_may_declare_its_split_settings_for_type_checkers(layer_class):
    layer = layer_class(
        5,
        weight_split_dims_mapping={"embed": "mdl"},
        activation_split_dims_mapping=("data",),
        rngs=nnx.Rngs(0),
    )
    assert layer.weight_split_dims_mapping == ("mdl",) and splits_of(layer) == {"w": ("mdl",)}
    assert layer.activation_split_dims_mapping == ("data",)
    assert layer.given == ({"embed": "mdl"} if layer_class is _Declared else None)
    assert layer_class(5, rngs=nnx.Rngs(0)).weight_split_dims_mapping is None


def test_the_librarys_constructors_declare_their_split_settings_for_type_checkers():
    for name in layers.__all__:
        layer_class = getattr(layers, name)
        if not (isinstance(layer_class, type) and issubclass(layer_class, BaseLayer)):
            continue
        declared = inspect.signature(inspect.unwrap(layer_class.__init__)).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in declared.values())
        assert takes_any or not layer_class.splits.keys() - declared.keys(), name
        assert all(split in _annotated(layer_class) for split in layer_class.splits), name


def _annotated(layer_class):
    return {key for base in layer_class.__mro__ for key in vars(base).get("__annotations__", ())}


def test_heads_of_keys_split_as_heads_and_one_head_stays_whole():
    for num_kv_heads, expected in ((2, (None, "mdl", None)), (1, (None, None))):
        layer = DotProductAttention(
            8,
            4,
            num_kv_heads=num_kv_heads,
            weight_split_dims_mapping={"heads": "mdl"},
            attention_sinks=True,
            rngs=nnx.Rngs(0),
        )
        actual = splits_of(layer)
        assert actual["query/w"] == actual["post/w"] == (None, "mdl", None)
        assert actual["key/w"] == expected and actual["sinks"] == ("mdl",)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"mpl": "mdl"}, ["weight_split_dims_mapping", "'mpl'", "Did you mean mlp?"]),
        ("mdl", ["weight_split_dims_mapping", "must be a sequence", "('mdl',)"]),
        ((None, "mdl", None), ["3 entries", "rank is 2", "one entry per dim"]),
    ],
    ids=["name", "text", "length"],
)
def test_a_mapping_that_does_not_fit_is_refused_where_the_layer_is_made(mapping, words):
    with pytest.raises(ConfigError) as error:
        TransformerFeedForward(5, 7, weight_split_dims_mapping=mapping, rngs=nnx.Rngs(0))
    assert all(word in str(error.value) for word in ["TransformerFeedForward", *words]), error


class Former(BaseLayer):
    """A user's layer that names its settings itself."""

    def __init__(self, dims, *, weight_split_dims_mapping=None, rngs):
        self.w = self.weight((dims, dims), weight_split_dims_mapping, rngs=rngs)


class Derived(Linear):
    """A user's layer that hands its base what it does not know."""

    splits = splits(weight=("embed", "own"), activation=())

    def __init__(self, dims, **settings):
        super().__init__(dims, dims, **settings)


def test_layers_of_users_take_their_settings_as_before_or_from_what_they_declare():
    assert splits_of(Former(3, weight_split_dims_mapping=("data",), rngs=nnx.Rngs(0))) == {
        "w": ("data",)
    }
    assert splits_of(Former(Dim(3, "embed", "mdl", is_explicit=True), rngs=nnx.Rngs(0))) == {
        "w": ("mdl", "mdl")
    }
    layer = Derived(3, weight_split_dims_mapping={"own": "mdl"}, rngs=nnx.Rngs(0))
    assert splits_of(layer) == {"w": (None, "mdl")}
    with pytest.raises(TypeError, match="hidden_split_dims_mapping"):
        Derived(3, hidden_split_dims_mapping=("mdl",), rngs=nnx.Rngs(0))
