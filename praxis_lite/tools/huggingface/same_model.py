"""The model that a directory's config.json describes, and a trained model beside it."""

from collections.abc import Mapping
from pathlib import Path

import fiddle as fdl
from flax import nnx

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.layers.base.variables import num_stacked_dims
from praxis_lite.tools.huggingface.decoder import lm_config
from praxis_lite.tools.huggingface.fields.decoder_settings import DecoderSettings
from praxis_lite.tools.huggingface.tensors.forms import Weight


def weights_of(settings: DecoderSettings) -> dict[str, Weight]:
    """Returns a model's weights by path, as its layers declare them; no array is made."""
    model = NnxModel(fdl.build(lm_config(settings))).abstract_module()
    return {
        f"params/{'/'.join(map(str, path))}": _declared(variable)
        for path, variable in nnx.to_flat_state(nnx.compat.state(model, nnx.Param))
    }


def _declared(variable: nnx.Param) -> Weight:
    metadata = variable.get_metadata()
    shape, num_stacked = tuple(variable.shape), num_stacked_dims(variable)
    return Weight(shape, num_stacked, metadata["dim_names"], metadata["matrix"])


def check_same_model(
    directory: Path, weights: Mapping[str, Weight], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks that a trained model has the weights of the model in a directory.

    Args:
      directory: with the config.json that `weights` are of.
      shapes: of the weights that are trained, by path.

    Raises:
      ConfigError: it has others.
    """
    expected = {path: weight.shape for path, weight in weights.items()}
    differing = [
        f"{path} is {shapes.get(path, 'not there')} in place of {expected.get(path, 'not there')}"
        for path in sorted({*shapes, *expected}) if shapes.get(path) != expected.get(path)
    ]
    if differing:
        raise ConfigError(
            f"The model that is trained is not the model of {directory}/config.json: "
            f"{few(differing, 2)}. They are two different models if HF_DIR and "
            "run.init_from_huggingface name two directories: name the same in both. Or take back "
            "the settings of task.model that give it other weights."
        )
