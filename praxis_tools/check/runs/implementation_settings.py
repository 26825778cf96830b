"""Settings that only change how a model computes: of custom models by their names, remat of any.

Settings of a config are switched there; attributes of remat in the built NNX model.
"""

import collections.abc
import copy
import dataclasses
import enum
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fiddle as fdl
import jax
from fiddle import daglish
from flax import nnx

from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.core.task import Task
from praxis_lite.layers.stacking.remat_policies import CHECKPOINT_POLICIES
from praxis_tools.check.runs.config_variants import buildables, parameters_of, settings_of

KEEP_EVERYTHING = "save_everything"
# Words of a setting's name, split at underscores: of switches, numbers and texts.
SWITCHES = {
    "scan", "scanned", "unroll", "unrolled", "flash", "fused", "fuse", "pallas", "chunked", "jit",
    "vmap", "vectorize", "vectorized", "offload",
}
NUMBERS = {"unroll", "chunk", "chunks", "tile", "tiles", "microbatch", "microbatches"}
BLOCKS = {"block", "blocks"}  # Next to a word of ATTENTION: "blocks" alone are layers.
# Of settings about recomputation in the backward pass.
ONLY_REMAT = {
    "remat", "remats", "rematerialize", "rematerialise", "rematerialization", "rematerialisation",
    "recompute", "recomputes", "recomputation",
}
REMAT = ONLY_REMAT | {"checkpoint", "checkpointing"}
KERNELS = {"implementation", "impl", "kernel", "backend"}
ATTENTION = {"attention", "attn", "atten", "flash", "q", "k", "kv", "query", "key"}
# Of settings about files, or about what is computed.
OTHERS = {"load", "save", "restore", "path", "dir", "file", "init", "every", "freq", "name"}
# Values to try for a text without a Literal type; a model may refuse them.
POLICIES = (
    "none", "save_everything", "save_nothing", "full", "minimal", "nothing", "nothing_saveable",
    "everything_saveable",
)
IMPLEMENTATIONS = ("xla", "dot_product", "einsum", "eager", "reference", "naive", "default")
FASTER = {
    "flash", "splash", "tokamax", "cudnn", "pallas", "triton", "fused", "chunked", "sdpa", "math",
}


@dataclasses.dataclass(frozen=True)
class ImplementationSetting:
    """A setting that only changes how a model computes, at all its places in a task's config.

    Attributes:
      name: of the setting.
      value: as the experiment has it.
      others: values to switch it to; the first that the model accepts is used.
    """

    name: str
    value: Any
    others: tuple[Any, ...]

    @property
    def is_of_remat(self) -> bool:
        """Whether it is about recomputation in the backward pass, which keeps random draws."""
        return is_of_remat(self.name)


def is_of_remat(name: str) -> bool:
    """Returns whether a setting, by its name, is about recomputation in the backward pass."""
    parts = set(name.lower().split("_"))
    return bool(parts & ONLY_REMAT or (parts & REMAT and not parts & OTHERS))


def implementation_settings(config: "fdl.Config") -> list[ImplementationSetting]:
    """Returns the settings of a task's custom models that are known by name."""
    found: dict[str, ImplementationSetting] = {}

    def record(name: str, value: Any, hint: Any) -> Any:
        if name not in found and _is_known(name, value):
            found[name] = ImplementationSetting(name, value, tuple(_others(name, value, hint)))
        return value

    for buildable in _of_others(_with_templates(config)):
        hints = _hints(fdl.get_callable(buildable))
        for name, value in _settings(buildable).items():
            _mapped(str(name), value, hints.get(name), record)
    return list(found.values())


def switched(config: "fdl.Config", setting: ImplementationSetting, new: Any) -> "fdl.Config":
    """Returns a copy of a config in which a setting has another value, at every place."""

    def switch(name: str, value: Any, hint: Any) -> Any:
        if name != setting.name or not _is_known(name, value):
            return value
        return not value if isinstance(value, bool) else new

    config = _with_templates(config)
    for buildable in _of_others(config):
        for name, value in _settings(buildable).items():
            changed = _mapped(str(name), value, None, switch)
            if changed is value:
                continue
            if isinstance(name, int):
                buildable[name] = changed
            else:
                setattr(buildable, name, changed)
    return config


def _with_templates(config: "fdl.Config") -> "fdl.Config":
    """Returns a copy in which bare classes and functions with such settings are an fdl.Partial."""

    def opened(value: Any, state: daglish.State) -> Any:
        if isinstance(value, functools.partial) and _is_template(value.func):
            value = fdl.Partial(value.func, *value.args, **value.keywords)
        elif _is_template(value):
            value = fdl.Partial(value)
        return state.map_children(value) if state.is_traversable(value) else value

    config = copy.deepcopy(config)
    config.task = daglish.MemoizedTraversal.run(opened, config.task)
    return config


def _is_template(value: Any) -> bool:
    if not (inspect.isclass(value) or inspect.isfunction(value)) or _is_own(value):
        return False
    build = value.__init__ if inspect.isclass(value) else value
    return any(_is_known(name, x.default) for name, x in parameters_of(build).items())


def _is_own(build: Any) -> bool:
    """Returns True for the library's classes and functions, but for those of its experiments."""
    module = getattr(build, "__module__", None) or ""
    return module.startswith("praxis_lite.") and not module.startswith("praxis_lite.experiments")


def _settings(buildable: fdl.Buildable) -> dict[str | int, Any]:
    """Returns settings by name, or by place where a class does not tell fiddle their names."""
    build = fdl.get_callable(buildable)
    # What an NNX class is called with, its metaclass hides.
    defaults = {
        name: x.default for name, x in parameters_of(getattr(build, "__init__", build)).items()
        if isinstance(build, type) and x.default is not inspect.Parameter.empty
    }
    return {**defaults, **settings_of(buildable), **fdl.ordered_arguments(buildable)}


def _of_others(config: "fdl.Config") -> Iterator[fdl.Buildable]:
    """Yields the buildables of a task's config that are not the library's own."""
    for buildable in buildables(config.task):
        if not _is_own(fdl.get_callable(buildable)):
            yield buildable


def _is_known(name: str, value: Any) -> bool:
    parts = set(name.lower().split("_"))
    if is_of_remat(name):
        if isinstance(value, int) and not isinstance(value, bool):
            return bool(parts & ONLY_REMAT)
        kinds = bool | str | enum.Enum | tuple | Mapping | None
        return isinstance(value, kinds) or _is_policy(value)
    if parts & OTHERS:
        return False
    if isinstance(value, bool):
        return bool(parts & SWITCHES)
    if isinstance(value, int):
        return bool(parts & NUMBERS or (parts & BLOCKS and parts & ATTENTION))
    if not isinstance(value, str | enum.Enum | type(None)):
        return False
    is_kernel = parts & KERNELS and parts & (ATTENTION | {"scan", "loss"})
    is_named = parts & (KERNELS | ATTENTION) and value in FASTER.union(IMPLEMENTATIONS[:-1])
    return bool(is_kernel or is_named)


def _is_of_policies(name: str, value: Any) -> bool:
    """Returns True for a policy of remat that is an object: a place by name, or a function."""
    return is_of_remat(name) and (isinstance(value, Mapping) or _is_policy(value))


def _is_policy(value: Any) -> bool:
    """Returns True for a function that could be a policy of `jax.checkpoint`."""
    return callable(value) and not isinstance(value, type | fdl.Buildable)


def _others(name: str, value: Any, hint: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif is_of_remat(name) and isinstance(value, int):
        yield from (0, False) if value else (1, True)
    elif isinstance(value, tuple | Mapping):
        yield from ("save_everything", None)
    elif _is_policy(value):
        yield from (None, jax.checkpoint_policies.everything_saveable)
    elif isinstance(value, int):
        # A chunk is to divide what it is cut from, as a rule.
        yield from (x for x in (value // 2, value * 2, 1) if x > 0 and x != value)
    elif isinstance(value, enum.Enum):
        yield from (x for x in type(value) if x is not value)
    else:
        choices = [x for x in _literals(hint) if isinstance(x, str)]
        if not choices and (isinstance(value, str) or str in typing.get_args(hint)):
            choices = POLICIES if is_of_remat(name) else IMPLEMENTATIONS
        if value is None and is_of_remat(name) and _names_functions(hint):
            choices = [jax.checkpoint_policies.nothing_saveable]
        yield from (x for x in choices if x != value)


def _names_functions(hint: Any) -> bool:
    """Returns True for a type hint that has a Callable in it."""
    if (typing.get_origin(hint) or hint) is collections.abc.Callable:
        return True
    return any(map(_names_functions, typing.get_args(hint)))


def _literals(hint: Any) -> list[Any]:
    """Returns the values that a type hint names, such as Literal["none", "full"] | None."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [x for inner in typing.get_args(hint) for x in _literals(inner)]


def _mapped(name: str, value: Any, hint: Any, change: Callable[[str, Any, Any], Any]) -> Any:
    """Returns `change(name, value, type hint)` of a setting, or of each in an object or a dict.

    An object or a dict in which nothing changes is returned itself.
    """
    if not _is_of_policies(name, value):
        if _is_object(value):
            hints, fields = _hints(type(value)), _fields(value)
            new = {key: _mapped(key, x, hints.get(key), change) for key, x in fields.items()}
            changed = {key: x for key, x in new.items() if x is not fields[key]}
            return dataclasses.replace(value, **changed) if changed else value
        if isinstance(value, Mapping):
            new = {key: _mapped(str(key), x, None, change) for key, x in value.items()}
            return type(value)(new) if any(new[key] is not x for key, x in value.items()) else value
    return change(name, value, hint)


def _is_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nnx.Module)


def _fields(value: Any) -> dict[str, Any]:
    # A Linen module has its parent among them.
    return {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value)
        if field.init and field.name not in ("parent", "name")
    }


def _hints(build: Any) -> dict[str, Any]:
    """Returns annotations of a function's arguments, or of a class' fields and its init's."""
    local = inspect.get_annotations(build) if callable(build) else {}
    init = getattr(build, "__init__", None) if isinstance(build, type) else None
    return {**(inspect.get_annotations(init) if inspect.isfunction(init) else {}), **local}


def remat_switched(task: Task) -> Task | None:
    """Returns a task with remat switched off where it was on, and on where it was off.

    An attribute counts if its name is about remat and its value is a bool, or a policy of the
    library. Returns None if no layer has such an attribute, or the model is not of NNX.
    """
    module = task.model.abstract_module()
    if not isinstance(task.model, NnxModel) or module is None:
        return None
    if not any(_switched_remat(layer) for _, layer in nnx.compat.iter_modules(module)):
        return None
    task = copy.copy(task)
    task.model = NnxModel(_RematSwitched(task.model.build))
    return task


@dataclasses.dataclass(frozen=True)
class _RematSwitched:
    """Builds the modules of `build`, remat switched."""

    build: Callable[..., nnx.Module]

    def __call__(self, **rngs: Any) -> nnx.Module:
        module = self.build(**rngs)
        for _, layer in nnx.compat.iter_modules(module):
            for name, value in _switched_remat(layer).items():
                setattr(layer, name, value)
        return module


def _switched_remat(layer: nnx.Module) -> dict[str, Any]:
    """Returns new values of a layer's attributes, of its class or of an object of settings."""

    def switch(name: str, value: Any, hint: Any) -> Any:
        if not is_of_remat(name):
            return value
        if isinstance(value, bool):
            return not value
        is_places = isinstance(value, tuple) and all(isinstance(x, tuple) for x in value)
        if is_places or (isinstance(value, str) and value in CHECKPOINT_POLICIES):
            return "save_nothing" if value == KEEP_EVERYTHING else KEEP_EVERYTHING
        return value

    result = {}
    for name in {*vars(layer), *filter(is_of_remat, dir(type(layer)))}:
        if isinstance(inspect.getattr_static(type(layer), name, None), property):
            continue
        value = getattr(layer, name)
        new = value if isinstance(value, Mapping) else _mapped(name, value, None, switch)
        if new is not value:
            result[name] = new
    if getattr(layer, "split_backward", False) and result:
        result["split_backward"] = False  # It computes all again, whatever the policy.
    return result
