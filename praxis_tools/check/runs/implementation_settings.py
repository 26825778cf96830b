"""Finds and changes implementation settings, which must not affect a model's results.

Examples are remat, attention kernels and chunk sizes. In the configs of custom models, these
settings are recognized by their names. In NNX models, remat is toggled by setting attributes of the
layers.
"""

import collections.abc
import copy
import dataclasses
import enum
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax
from fiddle import daglish
from flax import nnx

from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.task import Task
from praxis_lite.layers.stacking.remat_policies import CHECKPOINT_POLICIES
from praxis_tools.check.runs.config_variants import buildables, parameters_of, settings_of

SAVE_EVERYTHING = "save_everything"
# The following sets contain words in the names of settings (split at underscores). A bool with a
# word in SWITCHES is an implementation setting, and so is an int with a word in NUMBERS.
SWITCHES = {
    "scan",
    "scanned",
    "unroll",
    "unrolled",
    "flash",
    "fused",
    "fuse",
    "pallas",
    "chunked",
    "jit",
    "vmap",
    "vectorize",
    "vectorized",
    "offload",
}
NUMBERS = {"unroll", "chunk", "chunks", "tile", "tiles", "microbatch", "microbatches"}
BLOCKS = {"block", "blocks"}  # Only in names with a word in ATTENTION; otherwise blocks are layers.
# Words that refer to recomputation in the backward pass.
ONLY_REMAT = {
    "remat",
    "remats",
    "rematerialize",
    "rematerialise",
    "rematerialization",
    "rematerialisation",
    "recompute",
    "recomputes",
    "recomputation",
}
REMAT = ONLY_REMAT | {"checkpoint", "checkpointing"}
KERNELS = {"implementation", "impl", "kernel", "backend"}
ATTENTION = {"attention", "attn", "atten", "flash", "q", "k", "kv", "query", "key"}
# Settings with these words refer to files or affect results.
UNRELATED = {"load", "save", "restore", "path", "dir", "file", "init", "every", "freq", "name"}
# Values to try for a str setting without a Literal type. The model may reject them.
POLICIES = (
    "none",
    "save_everything",
    "save_nothing",
    "full",
    "minimal",
    "nothing",
    "nothing_saveable",
    "everything_saveable",
)
IMPLEMENTATIONS = ("xla", "dot_product", "einsum", "eager", "reference", "naive", "default")
FASTER = {
    "flash",
    "splash",
    "tokamax",
    "cudnn",
    "pallas",
    "triton",
    "fused",
    "chunked",
    "sdpa",
    "math",
}


@dataclasses.dataclass(frozen=True)
class ImplementationSetting:
    """A setting that must not affect a model's results.

    Attributes:
      name: Name of the setting. All settings with this name in a task's config are changed
        together.
      value: Value in the experiment.
      alternatives: Values to try. The first value that the model accepts is used.
    """

    name: str
    value: Any
    alternatives: tuple[Any, ...]

    @property
    def is_remat(self) -> bool:
        """Whether the setting controls recomputation, which does not change random numbers."""
        return is_remat_name(self.name)


def is_remat_name(name: str) -> bool:
    """Returns whether the name of a setting refers to recomputation in the backward pass."""
    words = set(name.lower().split("_"))
    return bool(words & ONLY_REMAT or (words & REMAT and not words & UNRELATED))


def implementation_settings(config: "fdl.Config") -> list[ImplementationSetting]:
    """Returns the implementation settings in a task's custom models, recognized by name."""
    found: dict[str, ImplementationSetting] = {}

    def record(name: str, value: Any, hint: Any) -> Any:
        if name not in found and _is_implementation_setting(name, value):
            alternatives = tuple(_alternatives(name, value, hint))
            found[name] = ImplementationSetting(name, value, alternatives)
        return value

    for buildable in _custom_buildables(_with_templates(config)):
        hints = _type_hints(fdl.get_callable(buildable))
        for name, value in _settings(buildable).items():
            _map_setting(str(name), value, hints.get(str(name)), record)
    return list(found.values())


def switch_setting(config: "fdl.Config", setting: ImplementationSetting, new: Any) -> "fdl.Config":
    """Returns a copy of a config in which all settings with this name have a new value."""

    def switch(name: str, value: Any, hint: Any) -> Any:
        if name != setting.name or not _is_implementation_setting(name, value):
            return value
        return not value if isinstance(value, bool) else new

    config = _with_templates(config)
    for buildable in _custom_buildables(config):
        for name, value in _settings(buildable).items():
            new_value = _map_setting(str(name), value, None, switch)
            if new_value is value:
                continue
            if isinstance(name, int):
                buildable[name] = new_value
            else:
                setattr(buildable, name, new_value)
    return config


def _with_templates(config: "fdl.Config") -> "fdl.Config":
    """Returns a copy in which each class or function with such settings is an fdl.Partial."""

    def to_partial(value: Any, state: daglish.State) -> Any:
        if isinstance(value, functools.partial) and _is_template(value.func):
            value = fdl.Partial(value.func, *value.args, **value.keywords)
        elif _is_template(value):
            value = fdl.Partial(value)
        return state.map_children(value) if state.is_traversable(value) else value

    config = copy.deepcopy(config)
    config.task = daglish.MemoizedTraversal.run(to_partial, config.task)
    return config


def _is_template(value: Any) -> bool:
    """Returns whether a value is a custom class or function with implementation settings."""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or _is_library(value):
        return False
    build = value.__init__ if inspect.isclass(value) else value
    return any(
        _is_implementation_setting(name, x.default) for name, x in parameters_of(build).items()
    )


def _is_library(build: Any) -> bool:
    """Returns whether a class or function belongs to the library, excluding experiments."""
    module = getattr(build, "__module__", None) or ""
    return module.startswith("praxis_lite.") and not module.startswith("praxis_lite.experiments")


def _settings(buildable: fdl.Buildable) -> dict[str | int, Any]:
    """Returns {name: setting}, or {position: setting} if Fiddle cannot determine the names."""
    build = fdl.get_callable(buildable)
    # The metaclass of NNX modules hides the signature of __init__.
    defaults = {
        name: x.default
        for name, x in parameters_of(getattr(build, "__init__", build)).items()
        if isinstance(build, type) and x.default is not inspect.Parameter.empty
    }
    return {**defaults, **settings_of(buildable), **fdl.ordered_arguments(buildable)}


def _custom_buildables(config: "fdl.Config") -> Iterator[fdl.Buildable]:
    """Yields the Configs and Partials in a task that do not belong to the library."""
    for buildable in buildables(config.task):
        if not _is_library(fdl.get_callable(buildable)):
            yield buildable


def _is_implementation_setting(name: str, value: Any) -> bool:
    words = set(name.lower().split("_"))
    if is_remat_name(name):
        if isinstance(value, int) and not isinstance(value, bool):
            return bool(words & ONLY_REMAT)
        types = bool | str | enum.Enum | tuple | Mapping | None
        return isinstance(value, types) or _is_policy_function(value)
    if words & UNRELATED:
        return False
    if isinstance(value, bool):
        return bool(words & SWITCHES)
    if isinstance(value, int):
        return bool(words & NUMBERS or (words & BLOCKS and words & ATTENTION))
    if not isinstance(value, str | enum.Enum | type(None)):
        return False
    # The setting is named after a kernel, or its value is a known implementation.
    is_kernel = words & KERNELS and words & (ATTENTION | {"scan", "loss"})
    has_known_value = words & (KERNELS | ATTENTION) and (
        value in FASTER.union(IMPLEMENTATIONS[:-1])
    )
    return bool(is_kernel or has_known_value)


def _is_remat_policy(name: str, value: Any) -> bool:
    """Returns whether a setting is a remat policy in the form of a mapping or a function."""
    return is_remat_name(name) and (isinstance(value, Mapping) or _is_policy_function(value))


def _is_policy_function(value: Any) -> bool:
    """Returns whether a value may be a policy function for `jax.checkpoint`."""
    return callable(value) and not isinstance(value, type | fdl.Buildable)


def _alternatives(name: str, value: Any, hint: Any) -> Iterator[Any]:
    """Yields other values to try for a setting, given its value and type hint."""
    if isinstance(value, bool):
        yield not value
    elif is_remat_name(name) and isinstance(value, int):
        yield from (0, False) if value else (1, True)
    elif isinstance(value, tuple | Mapping):
        yield from ("save_everything", None)
    elif _is_policy_function(value):
        yield from (None, jax.checkpoint_policies.everything_saveable)
    elif isinstance(value, int):
        # Dims usually must be divisible by their chunk size.
        yield from (x for x in (value // 2, value * 2, 1) if x > 0 and x != value)
    elif isinstance(value, enum.Enum):
        yield from (x for x in type(value) if x is not value)
    else:
        choices: Sequence[Any] = [x for x in _literal_values(hint) if isinstance(x, str)]
        if not choices and (isinstance(value, str) or str in typing.get_args(hint)):
            choices = POLICIES if is_remat_name(name) else IMPLEMENTATIONS
        if value is None and is_remat_name(name) and _contains_callable(hint):
            choices = [jax.checkpoint_policies.nothing_saveable]
        yield from (x for x in choices if x != value)


def _contains_callable(hint: Any) -> bool:
    """Returns whether a type hint is or contains Callable."""
    if (typing.get_origin(hint) or hint) is collections.abc.Callable:
        return True
    return any(map(_contains_callable, typing.get_args(hint)))


def _literal_values(hint: Any) -> list[Any]:
    """Returns the values in a type hint such as Literal["none", "full"] | None."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [x for inner in typing.get_args(hint) for x in _literal_values(inner)]


def _map_setting(name: str, value: Any, hint: Any, change: Callable[[str, Any, Any], Any]) -> Any:
    """Applies `change(name, value, type hint)` to a setting or to the fields of a dataclass.

    Dicts are treated like dataclasses. If nothing changes, the same object is returned.
    """
    cls: Callable[..., Any] = type(value)
    if not _is_remat_policy(name, value):
        if _is_dataclass_instance(value):
            hints, fields = _type_hints(type(value)), _fields(value)
            new = {key: _map_setting(key, x, hints.get(key), change) for key, x in fields.items()}
            changed = {key: x for key, x in new.items() if x is not fields[key]}
            return dataclasses.replace(value, **changed) if changed else value
        if isinstance(value, Mapping):
            new = {key: _map_setting(str(key), x, None, change) for key, x in value.items()}
            return cls(new) if any(new[key] is not x for key, x in value.items()) else value
    return change(name, value, hint)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nnx.Module)


def _fields(value: Any) -> dict[str, Any]:
    # Ignore the fields that every Linen module has.
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.init and field.name not in ("parent", "name")
    }


def _type_hints(build: Any) -> dict[str, Any]:
    """Returns the annotations of a function, or of a class and its __init__."""
    annotations = inspect.get_annotations(build) if callable(build) else {}
    init = getattr(build, "__init__", None) if isinstance(build, type) else None
    return {**(inspect.get_annotations(init) if inspect.isfunction(init) else {}), **annotations}


def switch_remat(task: Task) -> Task | None:
    """Returns a task in which remat is toggled in all layers.

    An attribute of a layer is toggled if its name refers to remat and its value is a bool or one of
    the library's checkpoint policies. Returns None if there are no such attributes or if the model
    does not use NNX.
    """
    model, module = task.model, task.model.abstract_module()
    if not isinstance(model, NnxModel) or module is None:
        return None
    if not any(_switched_attributes(layer) for _, layer in nnx.compat.iter_modules(module)):
        return None
    task = copy.copy(task)
    task.model = NnxModel(_SwitchedBuild(model.build))
    return task


@dataclasses.dataclass(frozen=True)
class _SwitchedBuild:
    """Calls `build` and toggles remat in the returned modules."""

    build: Callable[..., nnx.Module]

    def __call__(self, **rngs: Any) -> nnx.Module:
        module = self.build(**rngs)
        for _, layer in nnx.compat.iter_modules(module):
            for name, value in _switched_attributes(layer).items():
                setattr(layer, name, value)
        return module


def _switched_attributes(layer: nnx.Module) -> dict[str, Any]:
    """Returns a layer's remat attributes, with their toggled values.

    This includes class attributes and dataclasses with fields that control remat.
    """

    def switch(name: str, value: Any, hint: Any) -> Any:
        if not is_remat_name(name):
            return value
        if isinstance(value, bool):
            return not value
        # A policy given as a tuple of (name, placement) pairs.
        is_placement = isinstance(value, tuple) and all(isinstance(x, tuple) for x in value)
        if is_placement or (isinstance(value, str) and value in CHECKPOINT_POLICIES):
            return "save_nothing" if value == SAVE_EVERYTHING else SAVE_EVERYTHING
        return value

    switched = {}
    for name in {*vars(layer), *filter(is_remat_name, dir(type(layer)))}:
        if isinstance(inspect.getattr_static(type(layer), name, None), property):
            continue
        value = getattr(layer, name)
        new = value if isinstance(value, Mapping) else _map_setting(name, value, None, switch)
        if new is not value:
            switched[name] = new
    if getattr(layer, "split_backward", False) and switched:
        switched["split_backward"] = False  # This recomputes everything, regardless of the policy.
    return switched
