"""A trained model beside the model that a directory's config.json describes."""

from collections.abc import Mapping
from pathlib import Path

import fiddle as fdl

from praxis_lite.core.errors import few
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.tools.huggingface.decoder import lm_config
from praxis_lite.tools.huggingface.fields.decoder_settings import DecoderSettings


def difference(
    directory: Path, settings: DecoderSettings, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Returns a message of how two models differ, or None if their weights have the same shapes.

    Args:
      directory: with the config.json of `settings`.
      shapes: of the weights that are trained, by path.
    """
    model = NnxModel(fdl.build(lm_config(settings)))
    expected = {path: tuple(spec.shape) for path, spec in spec_leaves(model.weight_specs())}
    differing = [
        f"{path} is {shapes.get(path, 'not there')} in place of {expected.get(path, 'not there')}"
        for path in sorted({*shapes, *expected}) if shapes.get(path) != expected.get(path)
    ]
    if not differing:
        return None
    return (
        f"The model that is trained is not the model of {directory}/config.json: "
        f"{few(differing, 2)}. They are two different models if HF_DIR and "
        "run.init_from_huggingface name two directories: name the same in both. Or take back the "
        "settings of task.model that give it other weights."
    )
