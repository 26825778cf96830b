"""The model that `--model_args` of lm_eval names."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean, require
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.huggingface.model import HuggingFaceModel, load_on_devices
from praxis_lite.trained_model.loading import load
from praxis_lite.trained_model.trained_model import TrainedModel
from praxis_tools.lm_eval.harness import harness_model

_log = logging.getLogger(__name__)
USUAL_ROWS = 32
OF_LOADING = ("job", "pretrained", "step", "mesh", "settings", "packages")
# Arguments that lm_eval's command line always gives; here the mesh decides the devices.
NOT_FOLLOWED = ("device", "max_batch_size")
OF_THE_MODEL = (
    "batch_size", "max_length", "add_bos_token", "prefix_token_id", "seed", "num_cached_prefixes",
    "num_speculative_tokens",
)


def model_of_args(given: Mapping[str, Any]) -> Any:
    """Returns the model of lm_eval's arguments.

    Args:
      given: `job`, the directory of a job, or `pretrained`, that of a model of Hugging Face; `step`
        of the job's checkpoint; `mesh`: "attached" (the default: all accelerators), "job" (that of
        the job's config) or sizes of the axes, "1x4x2"; `settings`, a text or a list as for --set;
        `packages` of the user's own; and the arguments of `harness_model`. A batch_size of "auto"
        is 32. lm_eval's `device` and `max_batch_size` are ignored, and logged. None means that an
        argument is not given.

    Raises:
      ConfigError: an argument is not known, or has no such value; as `load` and `harness_model`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in NOT_FOLLOWED:
        if name in given:
            _log.info("%s=%s is ignored: the mesh decides the devices", name, given.pop(name))
    known = (*OF_LOADING, *OF_THE_MODEL)
    for name in given.keys() - set(known):
        raise ConfigError(
            f"lm_eval gives the model {name}={given[name]!r}; known here are {', '.join(known)}."
            f"{did_you_mean(name, known)} Leave it out, or fix its name in --model_args."
        )
    sources = [name for name in ("job", "pretrained") if name in given]
    require(
        len(sources) == 1, "Of job=DIR and pretrained=DIR the number in --model_args", len(sources),
        "1", "Name the directory of a job, or that of a model of Hugging Face.",
    )
    model = _job(given) if sources == ["job"] else _pretrained(given)
    settings = {name: given[name] for name in OF_THE_MODEL if name in given}
    if "batch_size" in settings:
        settings["batch_size"] = _num_rows(settings["batch_size"])
    return harness_model(model, **settings)


def _num_rows(given: object) -> object:
    """Returns batch_size as a number, which is a text on lm_eval's command line."""
    if isinstance(given, str) and given.partition(":")[0] == "auto":
        return USUAL_ROWS
    return int(given) if isinstance(given, str) and given.isdecimal() else given


def _job(given: Mapping[str, Any]) -> TrainedModel:
    return load(
        str(given["job"]), given.get("step"), mesh=_mesh(given.get("mesh", "attached")),
        settings=_texts(given, "settings"), packages=_texts(given, "packages"),
    )


def _pretrained(given: Mapping[str, Any]) -> HuggingFaceModel:
    for name in ("step", "packages"):
        require(
            name not in given, f"{name}, next to pretrained=DIR,", given.get(name), "no value",
            "It belongs to job=DIR.",
        )
    return load_on_devices(
        str(given["pretrained"]), _mesh(given.get("mesh", "attached")),
        settings=_texts(given, "settings"),
    )


def _mesh(given: object) -> MeshConfig | str:
    if given in ("attached", "job"):
        return given
    require(
        isinstance(given, str) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", given), "mesh", given,
        "'attached', 'job', or devices along each axis, such as 1x4x2",
    )
    return MeshConfig(ici_mesh_shape=tuple(map(int, given.split("x"))))


def _texts(given: Mapping[str, Any], name: str) -> Sequence[str]:
    texts = given.get(name, ())
    return [texts] if isinstance(texts, str) else list(texts)
