"""The rotary positions of a layer, given a config.json's `rope_scaling`, of all its spellings."""

import math
from typing import Any

import fiddle as fdl

from praxis_lite.checkpoints.huggingface.decoder_settings import (
    FULL,
    SLIDING,
    DecoderSettings,
    LayerKind,
)
from praxis_lite.errors import ConfigError, require
from praxis_lite.layers import (
    LinearScaledRotary,
    Llama3Rotary,
    LongRope,
    RotaryPositionalEmbedding,
    YarnRotary,
)
from praxis_lite.layers.embedding.rotary_scaling import yarn_factor


def rotary(
    settings: DecoderSettings, layer_kind: LayerKind
) -> "fdl.Partial[RotaryPositionalEmbedding]":
    """Returns the config of a layer's rotary positions.

    Raises:
      ConfigError: the kind of scaling, or one of its fields, is not known.
    """
    scaling, theta = dict(settings.rope_scaling or {}), settings.rope_theta
    if SLIDING in scaling or FULL in scaling:  # Of each kind its own, as transformers 5 has it.
        scaling = dict(scaling[SLIDING if layer_kind.slides else FULL])
    elif layer_kind.slides and settings.local_rope_theta is not None:
        scaling, theta = {}, settings.local_rope_theta
    theta = scaling.pop("rope_theta", theta)
    share = scaling.pop("partial_rotary_factor", settings.rotary_share)
    # transformers 4 calls it type, and 4.43 both.
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    shared = {"max_timescale": theta}
    if share != 1.0:
        shared["rotary_dims"] = int(settings.head_dims * share)
    length = scaling.pop("original_max_position_embeddings", settings.original_max_positions)
    if kind == "default":
        layer, given = RotaryPositionalEmbedding, {}
    elif kind == "linear":
        layer, given = LinearScaledRotary, {"factor": scaling.pop("factor")}
    elif kind == "llama3":
        layer, given = Llama3Rotary, {
            name: scaling.pop(name) for name in ("factor", "low_freq_factor", "high_freq_factor")
        } | {"original_max_positions": length}
    elif kind == "yarn":
        layer, given = YarnRotary, _yarn(scaling) | {"original_max_positions": length}
    elif kind == "longrope":
        layer, given = LongRope, {
            name: tuple(scaling.pop(name)) for name in ("short_factor", "long_factor")
        } | {"original_max_positions": length}
        factor = scaling.pop("factor", None)
        if factor is None and settings.max_positions is not None:
            factor = settings.max_positions / length
        given["attention_factor"] = scaling.pop("attention_factor", None) or _long_factor(
            factor, length
        )
    else:
        raise ConfigError(
            f"config.json: rope_scaling is of the kind {kind!r}; known are default, linear, "
            "llama3, yarn and longrope."
        )
    require(
        not scaling, f"config.json: rope_scaling of the kind {kind!r}", sorted(scaling),
        "no fields besides those that are known",
    )
    return fdl.Partial(layer, **shared, **given)


def _yarn(scaling: dict[str, Any]) -> dict[str, Any]:
    factor = scaling.pop("factor")
    given = {"factor": factor}
    for name in ("beta_fast", "beta_slow", "truncate"):
        value = scaling.pop(name, None)
        given |= {} if value is None else {name: value}
    mscale, of_all = scaling.pop("mscale", None), scaling.pop("mscale_all_dim", None)
    attention_factor = scaling.pop("attention_factor", None)
    if attention_factor is None and mscale and of_all:
        attention_factor = yarn_factor(factor, mscale) / yarn_factor(factor, of_all)
    return given | {"attention_factor": attention_factor}


def _long_factor(factor: float | None, length: int) -> float:
    if factor is None or factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(length))
