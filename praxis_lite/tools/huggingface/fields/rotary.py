"""The rotary positions of a layer, given a config.json's `rope_scaling`, of all its spellings."""

import math
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from praxis_lite.core.errors import ConfigError, require, shown
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
from praxis_lite.tools.huggingface.fields.decoder_settings import (
    FULL,
    SLIDING,
    DecoderSettings,
    LayerKind,
)
from praxis_lite.tools.huggingface.fields.field_types import OR_NULL, check_type

WHERE = "config.json: rope_scaling"  # Or rope_parameters, its name in transformers 5.
_SHARED = {"rope_theta": "number above 1", "partial_rotary_factor": "share"}
_LENGTH = {"original_max_position_embeddings": "count or null"}
# The fields of each kind besides those of all, with their types; those with null may be missing.
KINDS: dict[str, dict[str, str]] = {
    "default": _LENGTH,
    "linear": {"factor": "number above 0", **_LENGTH},
    "dynamic": {"factor": "number above 0", **_LENGTH},
    "proportional": {"factor": "number above 0 or null", **_LENGTH},
    "llama3": {
        "factor": "number above 0", "low_freq_factor": "number above 0",
        "high_freq_factor": "number above 0", **_LENGTH,
    },
    "yarn": {
        "factor": "number above 0 or null", "beta_fast": "number above 0 or null",
        "beta_slow": "number above 0 or null", "truncate": "true or false or null",
        "mscale": "number from 0 or null", "mscale_all_dim": "number from 0 or null",
        "attention_factor": "number above 0 or null", **_LENGTH,
    },
    "longrope": {
        "short_factor": "numbers above 0", "long_factor": "numbers above 0",
        "factor": "number above 0 or null", "attention_factor": "number above 0 or null", **_LENGTH,
    },
}
# Of published files, and of no numbers.
_NOT_READ = ("type", "rope_type", "finetuned")


def rotary(
    settings: DecoderSettings, layer_kind: LayerKind
) -> "fdl.Partial[RotaryPositionalEmbedding]":
    """Returns the config of a layer's rotary positions.

    Raises:
      ConfigError: the kind of scaling, or one of its fields, is not known, missing or no number.
    """
    kind, given = _scaling(settings, layer_kind)
    theta = given["rope_theta"]
    dims = settings.head_dims if settings.kv_lora_rank is None else settings.qk_rope_head_dim
    share = given["partial_rotary_factor"]
    is_whole = kind == "proportional" or share == 1.0  # The former leaves out pairs, not dims.
    turning = dims if is_whole else int(dims * share)
    require(
        turning > 0 and turning % 2 == 0,
        "config.json: the dims of a head that rotate (head_dim, partial_rotary_factor)", turning,
        "an even number", "Halves of a head rotate together.",
    )
    shared = {"max_timescale": theta} | ({} if is_whole else {"rotary_dims": turning})
    length, factor = _length(settings, given), given.get("factor")
    if kind == "default":
        return fdl.Partial(RotaryPositionalEmbedding, **shared)
    if kind == "linear":
        return fdl.Partial(LinearScaledRotary, factor=factor, **shared)
    if kind == "proportional":
        return fdl.Partial(ProportionalRotary, factor=factor or 1.0, share=share, **shared)
    require(
        length is not None, f"{WHERE} of the kind {kind!r}: original_max_position_embeddings",
        length, "an integer, or one in max_position_embeddings",
    )
    if kind == "dynamic":
        require(turning > 2, "config.json: the dims of a head that rotate", turning, "4 or more")
        length = settings.max_positions or length
        return fdl.Partial(DynamicRotary, factor=factor, original_max_positions=length, **shared)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        given = {name: given[name] for name in names}
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        require(low < high, f"{WHERE}: low_freq_factor", low, f"below high_freq_factor, {high}")
        return fdl.Partial(Llama3Rotary, **given, original_max_positions=length, **shared)
    if factor is None and settings.max_positions is not None:
        factor = settings.max_positions / length
    if kind == "yarn":
        require(factor is not None, f"{WHERE} of the kind 'yarn': factor", factor, "a number")
        local = _yarn(given, factor)
        return fdl.Partial(YarnRotary, **local, original_max_positions=length, **shared)
    pairs = turning // 2
    for name in ("short_factor", "long_factor"):
        count = len(given[name])
        require(count == pairs, f"{WHERE}: {name}", f"{count} numbers", f"{pairs}, one per pair")
    return fdl.Partial(
        LongRope, short_factor=tuple(given["short_factor"]),
        long_factor=tuple(given["long_factor"]), original_max_positions=length,
        attention_factor=given.get("attention_factor") or _long_factor(factor, length), **shared,
    )


def latent_scale(settings: DecoderSettings, layer_kind: LayerKind) -> float:
    """Returns the factor of DeepSeek's scores that comes with `mscale_all_dim`; 1.0 without."""
    kind, given = _scaling(settings, layer_kind)
    if kind == "default" or not given.get("mscale_all_dim"):
        return 1.0
    factor, length = given.get("factor"), _length(settings, given)
    if factor is None and settings.max_positions is not None and length is not None:
        factor = settings.max_positions / length
    require(factor is not None, f"{WHERE} of the kind {kind!r}: factor", factor, "a number")
    return yarn_factor(factor, given["mscale_all_dim"]) ** 2


def _scaling(settings: DecoderSettings, layer_kind: LayerKind) -> tuple[str, dict[str, Any]]:
    """Returns the kind of scaling and its fields, checked; theta and the share are among them."""
    scaling = dict(settings.rope_scaling or {})
    local = settings.local_rope_theta
    is_local = layer_kind.slides and local is not None
    theta = local if is_local else settings.rope_theta
    # Of each kind its own, as transformers 5 has it.
    if local is not None and scaling.keys() & {SLIDING, FULL}:
        own = scaling.get(SLIDING if layer_kind.slides else FULL) or {}
        require(isinstance(own, Mapping), f"{WHERE} of a kind of layers", own, "an object, or null")
        scaling = dict(own)
    elif is_local:
        scaling = {}
    # transformers 4 calls it type, and 4.43 both.
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in list(KINDS):
        raise ConfigError(
            f"{WHERE} is of the kind {shown(repr(kind))}; known are {', '.join(KINDS)}."
        )
    return kind, {
        "rope_theta": theta, "partial_rotary_factor": settings.rotary_share,
        **_checked(kind, scaling, settings.is_rotary_in_part),
    }


def _checked(kind: str, scaling: Mapping[str, Any], may_be_in_part: bool) -> dict[str, Any]:
    """Returns the fields that are not null, after their names and types are checked."""
    types = {**_SHARED, **KINDS[kind]}
    unknown = sorted(
        name for name, value in scaling.items()
        if name not in types and name not in _NOT_READ and value is not None
    )
    of_kind = f"{WHERE} of the kind {kind!r}"
    require(not unknown, of_kind, unknown, "no fields besides those that are known")
    for name, kind_of_value in types.items():
        if scaling.get(name) is not None:
            check_type(f"{of_kind}: {name}", scaling[name], kind_of_value)
        elif not kind_of_value.endswith(OR_NULL) and name not in _SHARED:
            check_type(f"{of_kind}: {name}", None, kind_of_value)
    share = scaling.get("partial_rotary_factor")
    require(
        may_be_in_part or share in (None, 1) or kind == "proportional",
        f"{of_kind}: partial_rotary_factor", share, "1", "Whole heads rotate in this family.",
    )
    return {name: scaling[name] for name in types if scaling.get(name) is not None}


def _length(settings: DecoderSettings, given: Mapping[str, Any]) -> int | None:
    original = given.get("original_max_position_embeddings")
    return settings.original_max_positions or original or settings.max_positions


def _yarn(given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    names = ("beta_fast", "beta_slow", "truncate")
    local = {"factor": factor} | {name: given[name] for name in names if name in given}
    fast, slow = local.get("beta_fast", 32.0), local.get("beta_slow", 1.0)
    require(slow < fast, f"{WHERE}: beta_slow", slow, f"below beta_fast, {fast}")
    mscale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    attention_factor = given.get("attention_factor")
    if attention_factor is None and mscale and of_all:
        attention_factor = yarn_factor(factor, mscale) / yarn_factor(factor, of_all)
    return local | {"attention_factor": attention_factor}


def _long_factor(factor: float | None, length: int) -> float:
    if factor is None or factor <= 1.0 or length == 1:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(length))
