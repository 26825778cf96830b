"""Implements --shrink, which reduces a model to fewer layers and smaller dims."""

import copy
import math

import fiddle as fdl

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.text.packed_text import PackedText
from praxis_lite.inputs.text.preferences import PreferenceData
from praxis_tools.check.runs.config_variants import buildables

# Names of settings in Pax and in other libraries.
LAYERS = {"num_layers", "num_encoder_layers", "num_decoder_layers", "depth", "n_layers"}
DIMS = {
    "model_dims",
    "hidden_dims",
    "input_dims",
    "output_dims",
    "embedding_dims",
    "hidden_size",
    "dim_per_head",
    "intermediate_size",
    "features",
    "dim",
    "d_model",
    "d_ff",
    "width",
    "mlp_dims",
}
DIMS |= {name.removesuffix("s") for name in DIMS}  # Pax uses "hidden_dims" and "hidden_dim".
IDS = {"vocab_size", "num_classes", "num_ids"}
LENGTHS = {"seq_len", "max_seq_length"}
DECODED = {"num_tokens", "max_decode_steps"}
MAX_DIM, MAX_VOCABULARY, MAX_LENGTH, MAX_DECODED = 32, 96, 64, 16
MAX_LAYERS = 2
FACTORS = (2, 3, 4, 5, 7, 8)


def shrink_config(config: "fdl.Config") -> "tuple[fdl.Config, list[str]]":
    """Returns a config with a smaller model, and descriptions of the reduced sizes.

    Dims keep their divisors among 2, 3, 4, 5, 7 and 8, so that dims that are not divisible by the
    mesh size remain so. Equal dims stay equal, as do dims that equal products such as num_heads x
    dim_per_head.

    Raises:
      ConfigError: The model has no setting with a known name.
    """
    config, changes = copy.deepcopy(config), []
    keeps_lengths = any(_has_fixed_length(x) for x in buildables(config.datasets))
    data_names = IDS if keeps_lengths else IDS | LENGTHS
    num_layers = _num_layers_to_keep(config)
    for root, names in (("task", data_names | LAYERS | DIMS | DECODED), ("datasets", data_names)):
        for buildable in buildables(getattr(config, root)):
            for name, value in list(fdl.ordered_arguments(buildable).items()):
                if name not in names or not isinstance(value, int) or isinstance(value, bool):
                    continue
                new = min(value, num_layers) if name in LAYERS else _smaller(name, value)
                if new != value:
                    setattr(buildable, name, new)
                    changes.append(f"{name} {value} ({new} was checked)")
    if not changes:
        known = ", ".join(sorted(LAYERS | DIMS | IDS))
        raise ConfigError(
            "--shrink found no setting to reduce in the task's config. It supports settings with "
            f"the names {known}. Remove --shrink, or reduce the model with --set."
        )
    return config, list(dict.fromkeys(changes))


def _has_fixed_length(data: "fdl.Buildable") -> bool:
    """Returns whether seq_len must be kept: the dataset rejects longer texts, or has buckets.

    The lengths of buckets must be below seq_len.
    """
    cls = fdl.get_callable(data)
    if cls is PackedText:
        return data.too_long == "refuse" or len(data.bucket_lengths) > 0
    return cls is PreferenceData


def _num_layers_to_keep(config: "fdl.Config") -> int:
    """Returns the number of layers to keep: 2, or the minimum that pipelines require."""
    repeats = [
        getattr(buildable, "num_stages", 1) * getattr(buildable, "circular_repeat", 1)
        for buildable in buildables(config.task)
        if hasattr(buildable, "num_stages")
    ]
    return math.lcm(MAX_LAYERS, *repeats)


def _smaller(name: str, value: int) -> int:
    if name in IDS:
        return _equally_divisible(value, MAX_VOCABULARY)
    if name in DECODED:
        return min(value, MAX_DECODED)
    return _equally_divisible(value, MAX_LENGTH if name in LENGTHS else MAX_DIM)


def _equally_divisible(value: int, max_value: int) -> int:
    """Returns the largest number up to `max_value` with the same divisors from FACTORS.

    If there is no such number, returns the least common multiple of these divisors.
    """
    if value <= max_value:
        return value
    is_divisible = {factor: value % factor == 0 for factor in FACTORS}
    for candidate in range(max_value, 1, -1):
        if all((candidate % factor == 0) == divides for factor, divides in is_divisible.items()):
            return candidate
    return math.lcm(*(factor for factor, divides in is_divisible.items() if divides))
