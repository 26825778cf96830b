"""The canonical splits of a transformer model's config, as Pax's `set_sharding_params_v1`."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.layers.attentions import DotProductAttention
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.positional_embeddings import TrainablePositionalEmbedding
from praxis_lite.layers.recurrents import RgLruBlock
from praxis_lite.layers.repeats import Repeat
from praxis_lite.layers.softmaxes import FullSoftmax, SharedEmbeddingSoftmax
from praxis_lite.layers.transformers import Transformer, TransformerFeedForward


def set_sharding_params(
    model: fdl.Buildable,
    *,
    batch_axes: Sequence[str] = ("replica", "data"),
    data_axis: str | None = "data",
    mdl_axis: str | None = "mdl",
) -> fdl.Buildable:
    """Returns a TransformerLm or TransformerEncoderDecoder config with every split set.

    Weights split over `data_axis` along the model dims and over `mdl_axis` along vocabulary,
    heads and hidden dims. Activations split their batch over `batch_axes`, and the heads, hidden
    and vocabulary dims over `mdl_axis`; the residual stream's model dims stay whole (Megatron's
    way, arXiv:1909.08053: one all-reduce after attention and one after the feed-forward).
    Templates already in the config keep their other settings, and those of layers that are not
    this library's dense ones (mixtures of experts) all of them.
    """
    batch = tuple(batch_axes)
    residual, hidden = (batch, None, None), (batch, None, mdl_axis)
    shared = {
        "weight_split_dims_mapping": (data_axis, mdl_axis),
        "activation_split_dims_mapping": hidden,
        "lookup_split_dims_mapping": residual,
    }
    attention = {
        "weight_split_dims_mapping": (data_axis, mdl_axis, None),
        "activation_split_dims_mapping": (batch, None, mdl_axis, None),
        "output_split_dims_mapping": residual,
    }
    splits = {
        SharedEmbeddingSoftmax: shared,
        FullSoftmax: {name: split for name, split in shared.items() if "lookup" not in name},
        Embedding: {
            "weight_split_dims_mapping": (mdl_axis, data_axis),
            "activation_split_dims_mapping": residual,
        },
        TrainablePositionalEmbedding: {"weight_split_dims_mapping": (None, data_axis)},
        DotProductAttention: attention,
        RgLruBlock: attention,
        TransformerFeedForward: {
            "weight_split_dims_mapping": (data_axis, mdl_axis),
            "hidden_split_dims_mapping": hidden,
            "activation_split_dims_mapping": residual,
        },
        # No splits, but --set reaches their settings once they are configs.
        Repeat: {},
        Transformer: {},
    }
    _set_splits(model, splits)
    return model


def _set_splits(parent: fdl.Buildable, splits: dict[type, dict[str, Any]]) -> None:
    """Sets the splits of the templates of `parent`, and of theirs, given or by default."""
    for name, parameter in inspect.signature(fdl.get_callable(parent)).parameters.items():
        if not name.endswith("_tpl"):
            continue
        value = getattr(parent, name, parameter.default)
        if isinstance(value, list | tuple):
            setattr(parent, name, [_with_splits(one, splits) for one in value])
        else:
            new = _with_splits(value, splits)
            if new is not value:
                setattr(parent, name, new)


def _with_splits(template: Any, splits: dict[type, dict[str, Any]]) -> Any:
    layer = fdl.get_callable(template) if isinstance(template, fdl.Buildable) else template
    known = _nearest(layer, splits)
    if known is None:
        return template
    config = template if isinstance(template, fdl.Buildable) else fdl.Partial(template)
    for name, split in splits[known].items():
        setattr(config, name, split)
    _set_splits(config, splits)
    return config


def _nearest(layer: Any, splits: dict[type, dict[str, Any]]) -> Callable[..., Any] | None:
    """Returns the class in `splits` that a class is, or descends from."""
    if not inspect.isclass(layer):
        return None
    return next((known for known in layer.__mro__ if known in splits), None)
