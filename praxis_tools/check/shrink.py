"""A smaller model of the same kind: fewer layers, smaller dims, what does not divide still not."""

import copy
import math

import fiddle as fdl

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.text.packed_text import PackedText
from praxis_lite.inputs.text.preferences import PreferenceData
from praxis_tools.check.runs.config_variants import buildables

# By the names of settings, Pax's and those usual elsewhere.
LAYERS = {"num_layers", "num_encoder_layers", "num_decoder_layers", "depth", "n_layers"}
DIMS = {
    "model_dims", "hidden_dims", "input_dims", "output_dims", "embedding_dims", "hidden_size",
    "dim_per_head", "intermediate_size", "features", "dim", "d_model", "d_ff", "width", "mlp_dim",
}
IDS = {"vocab_size", "num_classes", "num_ids"}
LENGTHS = {"seq_len", "max_seq_length"}
DECODED = {"num_tokens", "max_decode_steps"}
LARGEST_DIM, LARGEST_VOCABULARY, LONGEST, MOST_DECODED = 32, 96, 64, 16
MOST_LAYERS = 2
FACTORS = (2, 3, 4, 5, 7, 8)


def shrunk(config: "fdl.Config") -> "tuple[fdl.Config, list[str]]":
    """Returns a smaller config, and the sizes that are not checked, as `Certificate` names them.

    A dim keeps what divides it of 2, 3, 4, 5, 7 and 8, so that what was uneven on a mesh stays so;
    equal dims stay equal, and a dim of num_heads x dim_per_head stays that.

    Raises:
      ConfigError: no setting of the model has a name that is known.
    """
    config, changes = copy.deepcopy(config), []
    is_refused = any(_refuses_long(item) for item in buildables(config.datasets))
    of_data, layers = IDS if is_refused else IDS | LENGTHS, _fewest_layers(config)
    for root, names in (("task", of_data | LAYERS | DIMS | DECODED), ("datasets", of_data)):
        for buildable in buildables(getattr(config, root)):
            for name, value in list(fdl.ordered_arguments(buildable).items()):
                if name not in names or not isinstance(value, int) or isinstance(value, bool):
                    continue
                new = min(value, layers) if name in LAYERS else _smaller(name, value)
                if new != value:
                    setattr(buildable, name, new)
                    changes.append(f"{name} {value} ({new} was checked)")
    if not changes:
        known = ", ".join(sorted(LAYERS | DIMS | IDS))
        raise ConfigError(
            "--shrink found nothing to make smaller in the task's config; it knows settings of "
            f"these names, where they are larger than it makes them: {known}. Leave --shrink out, "
            "or make a smaller model with --set."
        )
    return config, list(dict.fromkeys(changes))


def _refuses_long(data: "fdl.Buildable") -> bool:
    """Returns True for data that refuses what does not fit into seq_len: lengths stay."""
    kind = fdl.get_callable(data)
    return kind is PreferenceData or (kind is PackedText and data.too_long == "refuse")


def _fewest_layers(config: "fdl.Config") -> int:
    """Returns how many layers a stack keeps: two, or as many as its pipeline needs."""
    repeats = [
        getattr(buildable, "num_stages", 1) * getattr(buildable, "circular_repeat", 1)
        for buildable in buildables(config.task) if hasattr(buildable, "num_stages")
    ]
    return math.lcm(MOST_LAYERS, *repeats)


def _smaller(name: str, value: int) -> int:
    if name in IDS:
        return _like(value, LARGEST_VOCABULARY)
    if name in DECODED:
        return min(value, MOST_DECODED)
    return _like(value, LONGEST if name in LENGTHS else LARGEST_DIM)


def _like(value: int, most: int) -> int:
    """Returns the largest number up to about `most` that the same FACTORS divide."""
    if value <= most:
        return value
    expected = {factor: value % factor == 0 for factor in FACTORS}
    for item in range(most, 1, -1):
        if all((item % factor == 0) == divides for factor, divides in expected.items()):
            return item
    return math.lcm(*(factor for factor, divides in expected.items() if divides))


