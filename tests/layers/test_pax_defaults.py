"""A setting of Pax, in a layer of Pax, has Pax's default, or a reason stands here."""

import inspect
from typing import Any

from praxis_lite import layers
from tests.support.every_case import assert_each
from tests.support.goldens import golden

# Layer and setting: why the default is another one.
DIFFERENT: dict[tuple[str, str], str] = {
    ("DotProductAttention", "hidden_dim"): "None stands for input_dim; Pax's 0 is refused there",
    ("TransformerEncoderDecoder", "encoder_stacked_transformer_tpl"): "Pax has no default at all",
    ("TransformerEncoderDecoder", "decoder_stacked_transformer_tpl"): "Pax has no default at all",
    ("TransformerFeedForward", "output_dims"): "None stands for input_dims; Pax's 0 does too",
    ("FeedForward", "weight_init"): "the initializer itself; Pax's None stands for the same one",
    ("TrainablePositionalEmbedding", "lookup_style"): "the same numbers without a one-hot",
}


def pax_defaults() -> dict[str, dict[str, Any]]:
    return golden("pax/cases.json")["class_defaults"]


def shared_settings() -> list[tuple[str, str]]:
    """Returns (layer, setting) for each one that both sides have, with a default on ours."""
    actual = []
    for name, defaults in sorted(pax_defaults().items()):
        layer = getattr(layers, name, None)
        if layer is None:
            continue
        for setting, parameter in inspect.signature(layer).parameters.items():
            if setting in defaults and parameter.default is not inspect.Parameter.empty:
                actual.append((name, setting))
    return actual


def test_every_setting_of_pax_has_its_default():
    assert_each(has_its_default, ((".".join(setting), setting) for setting in shared_settings()))


def has_its_default(layer_and_setting):
    name, setting = layer_and_setting
    ours = inspect.signature(getattr(layers, name)).parameters[setting].default
    pax = pax_defaults()[name][setting]
    if (name, setting) in DIFFERENT:
        assert ours != pax, "no longer different: remove its line"
    else:
        assert ours == pax
