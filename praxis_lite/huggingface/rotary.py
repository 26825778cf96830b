"""Configs of rotary positions from the `rope_scaling` of a config.json, in all its spellings."""

import math
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, require, require_choice
from praxis_lite.huggingface.decoder_settings import (
    FULL,
    SLIDING,
    DecoderSettings,
    LayerKind,
)
from praxis_lite.layers.embedding.positional_embeddings import RotaryPositionalEmbedding
from praxis_lite.layers.embedding.rotary_scaling import (
    DynamicRotary,
    LinearScaledRotary,
    Llama3Rotary,
    LongRope,
    ProportionalRotary,
    YarnRotary,
    yarn_factor,
)

WHERE = "config.json: rope_scaling"  # Or rope_parameters, its name in transformers 5.
# By kind, the fields that it must have and those that it may have, besides _SHARED.
KINDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "proportional": (set(), {"factor"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        set(),
        {"factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
         "attention_factor"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
_SHARED = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
# In published files, without effect.
_IGNORED = {"type", "rope_type", "finetuned"}


def rotary(
    settings: DecoderSettings, layer_kind: LayerKind
) -> "fdl.Partial[RotaryPositionalEmbedding]":
    """Returns the config of a layer's rotary positions.

    Raises:
      ConfigError: the kind of scaling or one of its fields is unknown, or a field is missing.
    """
    kind, given = _scaling(settings, layer_kind)
    theta = given["rope_theta"]
    dims = settings.head_dims if settings.kv_lora_rank is None else settings.qk_rope_head_dim
    share = given["partial_rotary_factor"]
    # "proportional" leaves out pairs of dims, by share.
    all_rotate = kind == "proportional" or share == 1.0
    shared = {"max_timescale": theta} | ({} if all_rotate else {"rotary_dims": int(dims * share)})
    length, factor = _length(settings, given), given.get("factor")
    if kind == "default":
        return fdl.Partial(RotaryPositionalEmbedding, **shared)
    if kind == "linear":
        return fdl.Partial(LinearScaledRotary, factor=factor, **shared)
    if kind == "proportional":
        return fdl.Partial(ProportionalRotary, factor=factor or 1.0, share=share, **shared)
    if kind == "dynamic":
        length = settings.max_positions or length
        return fdl.Partial(DynamicRotary, factor=factor, original_max_positions=length, **shared)
    if kind == "llama3":
        factors = {name: given[name] for name in KINDS["llama3"][0]}
        return fdl.Partial(Llama3Rotary, **factors, original_max_positions=length, **shared)
    if factor is None:
        factor = settings.max_positions / length
    if kind == "yarn":
        return fdl.Partial(
            YarnRotary, **_yarn(given, factor), original_max_positions=length, **shared
        )
    return fdl.Partial(
        LongRope, short_factor=tuple(given["short_factor"]),
        long_factor=tuple(given["long_factor"]), original_max_positions=length,
        attention_factor=given.get("attention_factor") or _long_factor(factor, length), **shared,
    )


def latent_scale(settings: DecoderSettings, layer_kind: LayerKind) -> float:
    """Returns the factor by which `mscale_all_dim` multiplies DeepSeek's scores; 1.0 without it."""
    kind, given = _scaling(settings, layer_kind)
    if kind == "default" or not given.get("mscale_all_dim"):
        return 1.0
    factor = given.get("factor") or settings.max_positions / _length(settings, given)
    return yarn_factor(factor, given["mscale_all_dim"]) ** 2


def _scaling(settings: DecoderSettings, layer_kind: LayerKind) -> tuple[str, dict[str, Any]]:
    """Returns the kind of scaling and its checked fields, which include theta and the share."""
    scaling = dict(settings.rope_scaling or {})
    local = settings.local_rope_theta
    is_local = layer_kind.slides and local is not None
    theta = local if is_local else settings.rope_theta
    # In transformers 5 each kind of layer may have a separate scaling.
    if local is not None and scaling.keys() & {SLIDING, FULL}:
        scaling = dict(scaling.get(SLIDING if layer_kind.slides else FULL) or {})
    elif is_local:
        scaling = {}
    # transformers 4 names it "type", and 4.43 has both names.
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    require_choice(f"{WHERE}: rope_type", kind, KINDS)
    given = {name: x for name, x in scaling.items() if x is not None and name not in _IGNORED}
    required, optional = KINDS[kind]
    if unknown := sorted(given.keys() - required - optional - _SHARED):
        raise ConfigError(
            f"{WHERE} of the kind {kind!r} has the unknown fields {unknown}, which might change "
            "what is computed."
        )
    if missing := sorted(required - given.keys()):
        raise ConfigError(f"{WHERE} of the kind {kind!r} lacks {', '.join(missing)}.")
    share = given.get("partial_rotary_factor")
    require(
        settings.is_rotary_in_part or share in (None, 1) or kind == "proportional",
        f"{WHERE} of the kind {kind!r}: partial_rotary_factor", share, "1",
        "All dims of a head rotate in this family.",
    )
    return kind, {"rope_theta": theta, "partial_rotary_factor": settings.rotary_share, **given}


def _length(settings: DecoderSettings, given: Mapping[str, Any]) -> int | None:
    original = given.get("original_max_position_embeddings")
    return settings.original_max_positions or original or settings.max_positions


def _yarn(given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    names = ("beta_fast", "beta_slow", "truncate")
    optional = {name: given[name] for name in names if name in given}
    mscale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    attention_factor = given.get("attention_factor")
    if attention_factor is None and mscale and of_all:
        attention_factor = yarn_factor(factor, mscale) / yarn_factor(factor, of_all)
    return {"factor": factor, **optional, "attention_factor": attention_factor}


def _long_factor(factor: float | None, length: int) -> float:
    if factor is None or factor <= 1.0 or length == 1:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(length))
