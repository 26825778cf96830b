"""Loads the model described by lm_eval's `--model_args`."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from praxis_lite.core.errors import ConfigError, did_you_mean, require
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.huggingface.model import HuggingFaceModel, load_on_devices
from praxis_lite.trained_model.loading import load
from praxis_lite.trained_model.trained_model import TrainedModel
from praxis_tools.lm_eval.harness import harness_model

_log = logging.getLogger(__name__)
DEFAULT_BATCH_SIZE = 32
LOADING_ARGS = ("job", "pretrained", "step", "mesh", "settings", "packages")
# Arguments that lm_eval's command line always passes. They have no effect, because the mesh
# determines which devices are used.
IGNORED_ARGS = ("device", "max_batch_size")
HARNESS_ARGS = (
    "batch_size",
    "max_length",
    "add_bos_token",
    "prefix_token_id",
    "seed",
    "num_cached_prefixes",
    "num_speculative_tokens",
)


def model_from_args(args: Mapping[str, Any]) -> Any:
    """Loads the model described by lm_eval's arguments.

    Args:
      args: Maps argument names to values. Arguments that are None are treated as missing. Either
        `job` (a job directory) or `pretrained` (a Hugging Face model directory) is required. The
        optional arguments are `step` (a checkpoint step of the job), `mesh` ("attached" for all
        accelerators, which is the default, "job" for the mesh in the job's config, or axis sizes
        such as "1x4x2"), `settings` (a string or list as in --set), `packages` (the user's
        packages), and the arguments of `harness_model`. A batch_size of "auto" means 32. lm_eval's
        `device` and `max_batch_size` are ignored.

    Returns:
      The result of `harness_model`.

    Raises:
      ConfigError: An argument is unknown or invalid, or the model cannot be loaded.
    """
    args = {name: value for name, value in args.items() if value is not None}
    for name in IGNORED_ARGS:
        if name in args:
            _log.info("%s=%s is ignored: the mesh determines the devices", name, args.pop(name))
    known = (*LOADING_ARGS, *HARNESS_ARGS)
    for name in args.keys() - set(known):
        raise ConfigError(
            f"--model_args contains {name}={args[name]!r}; expected only {', '.join(known)}."
            f"{did_you_mean(name, known)} Remove it or correct its name."
        )
    sources = [name for name in ("job", "pretrained") if name in args]
    if len(sources) != 1:
        found = "both job=DIR and" if sources else "neither job=DIR nor"
        raise ConfigError(
            f"--model_args contains {found} pretrained=DIR; expected exactly one of them. Set "
            "either a job directory or a Hugging Face model directory."
        )
    model = _load_job(args) if sources == ["job"] else _load_pretrained(args)
    harness_args = {name: args[name] for name in HARNESS_ARGS if name in args}
    if "batch_size" in harness_args:
        harness_args["batch_size"] = _batch_size(harness_args["batch_size"])
    return harness_model(model, **harness_args)


def _batch_size(value: object) -> object:
    """Parses batch_size, which lm_eval's command line passes as a string."""
    if isinstance(value, str) and value.partition(":")[0] == "auto":
        return DEFAULT_BATCH_SIZE
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _load_job(args: Mapping[str, Any]) -> TrainedModel:
    return load(
        str(args["job"]),
        args.get("step"),
        mesh=_mesh(args.get("mesh", "attached")),
        settings=_strings(args, "settings"),
        packages=_strings(args, "packages"),
    )


def _load_pretrained(args: Mapping[str, Any]) -> HuggingFaceModel:
    for name in ("step", "packages"):
        if name in args:
            raise ConfigError(
                f"--model_args: {name}={args[name]!r} cannot be combined with pretrained=DIR; it "
                "requires job=DIR."
            )
    return load_on_devices(
        str(args["pretrained"]),
        _mesh(args.get("mesh", "attached")),
        settings=_strings(args, "settings"),
    )


def _mesh(value: object) -> MeshConfig | Literal["attached", "job"]:
    if value == "attached":
        return "attached"
    if value == "job":
        return "job"
    sizes = value if isinstance(value, str) else ""
    require(
        re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) is not None,
        "mesh",
        value,
        "'attached', 'job', or axis sizes such as 1x4x2",
    )
    return MeshConfig(ici_mesh_shape=tuple(map(int, sizes.split("x"))))


def _strings(args: Mapping[str, Any], name: str) -> Sequence[str]:
    """Returns an argument, which may be a string or a list of strings, as a list."""
    value = args.get(name, ())
    return [value] if isinstance(value, str) else list(value)
