"""Sizes of a config.json that contradict each other, each named by its field."""

import math
from collections.abc import Callable

from praxis_lite.core.errors import require
from praxis_lite.tools.huggingface.fields.decoder_settings import DecoderSettings

# As many weights as shapes and offsets can still be counted for, far above any model.
MAX_WEIGHTS = 2**50


def check_fit(settings: DecoderSettings, field_of: Callable[[str], str]) -> None:
    """Checks the sizes that the types of single fields leave open.

    Args:
      field_of: the field of config.json that a setting has in this family.

    Raises:
      ConfigError: two fields contradict one another; names both.
    """

    def check(condition: bool, name: str, value: object, expected: str) -> None:
        require(condition, f"config.json: {field_of(name)}", value, expected)

    heads, dims = field_of("num_heads"), field_of("model_dims")
    if settings.kv_lora_rank is None:
        check(
            settings.dim_per_head is not None or settings.model_dims % settings.num_heads == 0,
            "num_heads", settings.num_heads,
            f"a divisor of {dims}, {settings.model_dims}, where {field_of('dim_per_head')} does "
            "not say the dims of a head",
        )
        kv_heads = settings.num_kv_heads or settings.num_heads
        check(
            settings.num_heads % kv_heads == 0, "num_kv_heads", kv_heads,
            f"a divisor of {heads}, {settings.num_heads}",
        )
    else:
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check(getattr(settings, name) is not None, name, None, "a number of dims")
    if settings.layer_types is not None:
        check(
            len(settings.layer_types) == settings.num_layers, "layer_types",
            f"of {len(settings.layer_types)} layers",
            f"of {field_of('num_layers')}, {settings.num_layers} layers",
        )
    if settings.num_experts is not None:
        _check_experts(settings, check, field_of)
    _check_size(settings, field_of)


def _check_experts(
    settings: DecoderSettings, check: Callable[..., None], field_of: Callable[[str], str]
) -> None:
    experts = settings.num_experts
    check(
        settings.num_experts_per_token <= experts, "num_experts_per_token",
        settings.num_experts_per_token, f"at most {field_of('num_experts')}, {experts}",
    )
    groups, chosen = settings.num_expert_groups, settings.num_expert_groups_per_token
    if groups == 1:
        return
    check(
        experts % groups == 0 and experts // groups > 1, "num_expert_groups", groups,
        f"a divisor of {field_of('num_experts')}, {experts}, with two experts a group at least",
    )
    check(
        chosen <= groups, "num_expert_groups_per_token", chosen,
        f"at most {field_of('num_expert_groups')}, {groups}",
    )
    most = chosen * experts // groups
    check(
        settings.num_experts_per_token <= most, "num_experts_per_token",
        settings.num_experts_per_token, f"at most the {most} experts of {chosen} groups",
    )


def _check_size(settings: DecoderSettings, field_of: Callable[[str], str]) -> None:
    hidden = settings.hidden_dims or 4 * settings.model_dims
    per_expert = (settings.expert_hidden_dims or hidden) * (settings.num_experts or 0)
    of_heads = settings.num_heads * (settings.v_head_dim or settings.head_dims)
    widest = max(hidden, per_expert, of_heads, hidden * settings.num_shared_experts)
    rows = max(
        settings.num_layers * widest, settings.vocab_size, settings.max_seq_length or 0
    )
    names = ("num_layers", "model_dims", "hidden_dims", "num_heads", "vocab_size")
    require(
        rows * settings.model_dims <= MAX_WEIGHTS,
        f"config.json: the number of weights by {', '.join(map(field_of, names))}",
        f"about 2^{math.log2(rows * settings.model_dims):.0f}", "at most 2^50",
    )
