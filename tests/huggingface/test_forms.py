"""Forms of weights in tensors of Hugging Face: what follows from dims, and what a table says."""

import dataclasses
import json
import string

import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.huggingface.family import Entry, family_of
from praxis_lite.huggingface.tensors.tensor_layouts import Weight, form_of, named_form, piece_of
from praxis_lite.huggingface.weights import as_tensor, map_tensors, weights_of
from praxis_lite.layers.base.dims import NONE, Matrix
from tests.support.goldens import GOLDENS

HEADS = ("embed", "heads", "head_dim")
INTO_HEADS, FROM_HEADS = Matrix((0,), (1, 2)), Matrix((1, 2), (0,))


def in_letters(form):
    """Returns a form as einops writes the tensor's side, our dims being a, b, c."""
    letters = ["".join(f"{string.ascii_lowercase[i]} " for i in group).strip() for group in form]
    return " ".join(x if len(x) == 1 else f"({x})" for x in letters)


def piece(names, matrix, *, num_stacked=0, has_expert=False):
    shape = tuple(range(2, 2 + num_stacked + len(names)))
    weight = Weight(shape, num_stacked, names, matrix)
    return piece_of(weight, num_stacked == 1, has_expert, "The table of tern: t: w")


@pytest.mark.parametrize("names, matrix, expected, with_inputs_first", [
    (HEADS, INTO_HEADS, "(b c) a", "a (b c)"),
    (HEADS, FROM_HEADS, "a (b c)", "(b c) a"),
    (("heads", "head_dim", "embed"), Matrix((0, 1), (2,)), "c (a b)", "(a b) c"),
    (("embed", "head_dim"), Matrix((0,), (1,)), "b a", "a b"),
    (("embed", None), None, "b a", "a b"),
    ((None, "heads", "head_dim"), INTO_HEADS, "(b c) a", "a (b c)"),
    (("expert", "embed", "mlp"), Matrix((1,), (2,)), "a c b", "a b c"),
    (("embed", "vocab"), NONE, "b a", "b a"),
    (("vocab", "embed"), NONE, "a b", "a b"),
    ((None, "embed"), NONE, "a b", "a b"),
    (("heads", "head_dim"), NONE, "(a b)", "(a b)"),
    (("expert", "mlp"), NONE, "a b", "a b"),
    (("head_dim",), NONE, "a", "a"),
    ((None,), None, "a", "a"),
])  # fmt: skip
def test_the_form_follows_from_the_dims(names, matrix, expected, with_inputs_first):
    for num_stacked in (0, 1):  # A stack's dim is the layer in the tensor's name.
        actual = piece(names, matrix, num_stacked=num_stacked)
        assert in_letters(form_of(actual)) == expected
        assert in_letters(form_of(actual, inputs_first=True)) == with_inputs_first


def test_an_expert_that_the_name_numbers_is_no_dim_of_the_tensor():
    for num_stacked in (0, 1):
        actual = piece(
            ("expert", "mlp", "embed"),
            Matrix((1,), (2,)),
            num_stacked=num_stacked,
            has_expert=True,
        )
        assert in_letters(form_of(actual)) == "b a"
        assert actual.sizes == (3 + num_stacked, 4 + num_stacked)


@pytest.mark.parametrize("names, dims, expected", [
    (HEADS, "embed (heads head_dim)", "a (b c)"),
    (HEADS, " (head_dim heads) embed ", "(c b) a"),
    (HEADS, "heads embed head_dim", "b a c"),
    (("embed", "head_dim"), "(heads head_dim) embed", "b a"),
    (("expert", "embed", "mlp"), "mlp expert embed", "c a b"),
])  # fmt: skip
def test_a_table_may_say_the_form_in_the_names_of_our_dims(names, dims, expected):
    assert in_letters(named_form(piece(names, INTO_HEADS), dims)) == expected


def test_a_head_without_a_dim_is_one_of_size_one_where_theirs_stands_alone():
    actual = named_form(piece(("embed", "head_dim"), None), "heads embed head_dim")
    assert actual == ((), (0,), (1,))


def family_with(entries, **fields):
    """Returns Llama's family as tern with other entries, its settings, and its weights."""
    config = json.loads((GOLDENS / "hf/llama/config.json").read_text()) | fields
    llama = family_of(config)
    tensors = {name: x for name, x in llama.tensors.items() if name not in entries}
    for name, entry in entries.items():
        if entry:
            fields = {**entry} if isinstance(entry, dict) else {"to": entry}
            to = fields.pop("to")
            tensors[name] = Entry(tuple([to] if isinstance(to, str) else to), **fields)
    settings = llama.decoder_settings(config)
    return dataclasses.replace(llama, name="tern", tensors=tensors), settings, weights_of(settings)


def by_tensor(*arguments):
    """Returns the parts of each tensor."""
    result = {}
    for part in map_tensors(*arguments):
        result.setdefault(part.tensor, []).append(part)
    return result


def tensor_and_pieces(local):
    """Returns a tensor made of pieces, which come out of it again, and these."""
    rng = np.random.default_rng(0)
    pieces = [rng.normal(size=part.piece_shape()) for part in local]
    tensor = as_tensor(local, pieces)
    for part, x in zip(local, pieces, strict=True):
        np.testing.assert_array_equal(part.to_weight_layout(tensor), x)
    return tensor, pieces


PREFIX = "model.layers.{layer}.self_attn."
Q, K, V, O = (f"{PREFIX}{name}_proj.weight" for name in "qkvo")  # noqa: E741
QUERY = "self_attention/query/w"
ALL = ["self_attention/query/w", "self_attention/key/w", "self_attention/value/w"]


def test_a_made_up_family_has_the_tensors_that_its_table_says():
    joined = f"{PREFIX}all.weight"
    family, settings, weights = family_with(
        {
            Q: False,
            K: False,
            V: False,
            joined: ALL,
            O: {"to": "self_attention/post/w", "dims": "heads embed head_dim"},
        }
    )
    of_tensor = by_tensor(dataclasses.replace(family, inputs_first=True), settings, weights)
    local = of_tensor[joined.format(layer=2)]
    assert [part.index for part in local] == [(2,)] * 3
    actual, pieces = tensor_and_pieces(local)
    expected = np.concatenate([x.reshape(settings.model_dims, -1) for x in pieces], axis=1)
    np.testing.assert_array_equal(actual, expected)
    actual, (x,) = tensor_and_pieces(of_tensor[O.format(layer=0)])
    np.testing.assert_array_equal(actual, x.transpose(1, 0, 2))
    # The head lies as ever, with the classes first.
    (head,) = of_tensor["lm_head.weight"]
    assert head.shape() == (settings.vocab_size, settings.model_dims)


def test_one_head_of_keys_without_a_dim_is_joined_with_queries_of_several():
    config = json.loads((GOLDENS / "hf/phi3/config.json").read_text())
    family = family_of(config)
    settings = family.decoder_settings(config | {"num_key_value_heads": 1})
    of_tensor = by_tensor(family, settings, weights_of(settings))
    actual, pieces = tensor_and_pieces(of_tensor["model.layers.1.self_attn.qkv_proj.weight"])
    assert [x.ndim for x in pieces] == [3, 2, 2]
    np.testing.assert_array_equal(actual, np.concatenate([x.reshape(len(x), -1).T for x in pieces]))


def test_weights_alternate_by_heads_or_one_by_one():
    up, gate = (f"model.layers.{{layer}}.mlp.{name}_proj.weight" for name in ("up", "gate"))
    both = ["ff_layer/ffn_layer1_gate/linear/w", "ff_layer/ffn_layer1/linear/w"]
    of_tensor = by_tensor(
        *family_with(
            {
                Q: {"to": ALL, "joined": "heads"},
                K: False,
                V: False,
                gate: False,
                up: {"to": both, "dims": "embed mlp", "joined": "interleaved"},
            },
            num_key_value_heads=None,
        )
    )
    actual, pieces = tensor_and_pieces(of_tensor[Q.format(layer=1)])
    D, N, K_ = pieces[0].shape
    for i, x in enumerate(pieces):
        by_head = actual.reshape(N, 3, K_, D)[:, i]
        np.testing.assert_array_equal(by_head, x.transpose(1, 2, 0))
    actual, pieces = tensor_and_pieces(of_tensor[up.format(layer=0)])
    for i, x in enumerate(pieces):
        np.testing.assert_array_equal(actual[:, i::2], x)


@pytest.mark.parametrize("entries, words", [
    ({Q: {"to": QUERY, "dims": "(heads head_dimm) embed"}},
     [Q, QUERY, "embed 48, heads", "'head_dimm'", "Did you mean head_dim"]),
    ({Q: {"to": QUERY, "dims": "heads embed"}}, [Q, "layers 3, embed 48, heads", "'heads embed'"]),
    ({Q: {"to": QUERY, "dims": "(heads head_dim embed"}}, [Q, "'(heads head_dim embed'"]),
    ({Q: {"to": QUERY, "dims": "heads heads head_dim embed"}}, [Q, "'heads'"]),
    ({"again.{layer}.weight": QUERY},
     [Q.format(layer=0), "again.0.weight", QUERY, "layers 3, embed 48, heads"]),
    ({Q: [QUERY, QUERY]}, [Q.format(layer=0), QUERY, "maps both"]),
    ({"model.norm.weight": False}, ["params/final_ln/scale"]),
    ({"norm.{expert}.weight": "final_ln/scale"}, ["norm.{expert}", "unnamed 48."]),
    ({"norm.weight": {"to": ["final_ln/scale"] * 2, "joined": "heads"}},
     ["norm.weight", "unnamed 48", "'heads'"]),
])  # fmt: skip
def test_an_entry_that_does_not_fit_is_refused_with_the_dims_that_there_are(entries, words):
    with pytest.raises(ConfigError) as error:
        map_tensors(*family_with(entries))
    message = str(error.value)
    assert all(word in message for word in ["The table of tern", *words]), message
