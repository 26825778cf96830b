"""Configs of rotary position embeddings from the `rope_scaling` field in config.json."""

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
# Required and optional fields for each kind of scaling, in addition to _SHARED.
KINDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "proportional": (set(), {"factor"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        set(),
        {
            "factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
        },
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
_SHARED = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
# Fields that occur in published files but do not change the computation.
_IGNORED = {"type", "rope_type", "finetuned"}


def rotary(
    settings: DecoderSettings, layer_kind: LayerKind
) -> "fdl.Partial[RotaryPositionalEmbedding]":
    """Returns the config of a layer's rotary position embedding.

    Raises:
      ConfigError: The kind of scaling or one of its fields is unknown, or a field is missing.
    """
    kind, fields = _scaling(settings, layer_kind)
    theta = fields["rope_theta"]
    dims = settings.head_dims if settings.kv_lora_rank is None else settings.qk_rope_head_dim
    share = fields["partial_rotary_factor"]
    # ProportionalRotary takes the fraction of rotated dims as an argument.
    all_rotate = kind == "proportional" or share == 1.0
    shared = {"max_timescale": theta} | ({} if all_rotate else {"rotary_dims": int(dims * share)})
    length, factor = _original_length(settings, fields), fields.get("factor")
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
        factors = {name: fields[name] for name in KINDS["llama3"][0]}
        return fdl.Partial(Llama3Rotary, **factors, original_max_positions=length, **shared)
    if factor is None:
        factor = _default_factor(settings, fields)
    if kind == "yarn":
        return fdl.Partial(
            YarnRotary, **_yarn(fields, factor), original_max_positions=length, **shared
        )
    return fdl.Partial(
        LongRope,
        short_factor=tuple(fields["short_factor"]),
        long_factor=tuple(fields["long_factor"]),
        original_max_positions=length,
        attention_factor=fields.get("attention_factor") or _longrope_factor(factor, length),
        **shared,
    )


def latent_scale(settings: DecoderSettings, layer_kind: LayerKind) -> float:
    """Returns DeepSeek's factor for attention scores from `mscale_all_dim`, or 1.0 if unset."""
    kind, fields = _scaling(settings, layer_kind)
    if kind == "default" or not fields.get("mscale_all_dim"):
        return 1.0
    factor = fields.get("factor") or _default_factor(settings, fields)
    return yarn_factor(factor, fields["mscale_all_dim"]) ** 2


def _scaling(settings: DecoderSettings, layer_kind: LayerKind) -> tuple[str, dict[str, Any]]:
    """Returns the kind of RoPE scaling in a layer and its checked fields, including defaults."""
    scaling = dict(settings.rope_scaling or {})
    local = settings.local_rope_theta
    is_local = layer_kind.slides and local is not None
    theta = local if is_local else settings.rope_theta
    # transformers 5 may specify a separate scaling for each kind of layer.
    if local is not None and scaling.keys() & {SLIDING, FULL}:
        scaling = dict(scaling.get(SLIDING if layer_kind.slides else FULL) or {})
    # A separate theta for sliding layers implies that these layers are not scaled.
    elif is_local:
        scaling = {}
    # transformers before 4.43 writes only "type"; later versions write "rope_type", "type" or both.
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    # The name in early versions of Phi-3.
    kind = "longrope" if kind == "su" else kind
    require_choice(f"{WHERE}: rope_type", kind, KINDS)
    fields = {name: x for name, x in scaling.items() if x is not None and name not in _IGNORED}
    required, optional = KINDS[kind]
    if unknown := sorted(fields.keys() - required - optional - _SHARED):
        raise ConfigError(
            f"{WHERE} of type {kind!r} has the unknown fields {unknown}, which might affect the "
            f"results; expected only {sorted(required | optional | _SHARED)}."
        )
    if missing := sorted(required - fields.keys()):
        raise ConfigError(f"{WHERE} of type {kind!r} lacks {', '.join(missing)}.")
    share = fields.get("partial_rotary_factor")
    require(
        settings.is_rotary_in_part or share in (None, 1) or kind == "proportional",
        f"{WHERE} of type {kind!r}: partial_rotary_factor",
        share,
        "1",
        "This family always rotates all dims of a head.",
    )
    return kind, {"rope_theta": theta, "partial_rotary_factor": settings.rotary_share, **fields}


def _original_length(settings: DecoderSettings, fields: Mapping[str, Any]) -> int | None:
    """Returns the context length before scaling."""
    original = fields.get("original_max_position_embeddings")
    return settings.original_max_positions or original or settings.max_positions


def _default_factor(settings: DecoderSettings, fields: Mapping[str, Any]) -> float:
    """Returns max_positions divided by the context length before scaling."""
    length = _original_length(settings, fields)
    if settings.max_positions is None or length is None:
        raise ConfigError(
            f"{WHERE} has no factor, and config.json has no max_position_embeddings from which to "
            "compute it. Add one of them."
        )
    return settings.max_positions / length


def _yarn(fields: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Returns the arguments of `YarnRotary`."""
    names = ("beta_fast", "beta_slow", "truncate")
    optional = {name: fields[name] for name in names if name in fields}
    mscale, mscale_all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
    attention_factor = fields.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all_dim)
    return {"factor": factor, **optional, "attention_factor": attention_factor}


def _longrope_factor(factor: float | None, length: int | None) -> float:
    """Returns longrope's default attention factor."""
    if factor is None or factor <= 1.0 or length is None or length == 1:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(length))
