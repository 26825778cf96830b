"""A Flax NNX module seen as plain nested dicts of arrays: split once, outside every step."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.models.layer_paths import naming_the_layer
from praxis_lite.core.models.model import MdlVars, Model, ShardedWeight
from praxis_lite.core.models.nnx_declarations import declared_spec
from praxis_lite.core.models.nnx_variables import (
    Leaf,
    Path,
    collection,
    fresh_value,
    leaves_of,
    nested,
    path_text,
    require_array,
    stored_at,
    value_of,
)
from praxis_lite.core.models.tallies import Tally
from praxis_lite.core.sharding.padding import is_traced

__all__ = ("NnxModel", "mdl_vars_of")


@dataclasses.dataclass(frozen=True)
class _Split:
    """A module's structure in training and in evaluation, and its abstract leaves by path."""

    training: nnx.GraphDef
    evaluation: nnx.GraphDef
    leaves: list[tuple[Path, Leaf]]


class NnxModel(Model):
    """A Flax NNX module, as its users write it.

    `nnx.Param` variables are "params", which a learner may touch; statistics, caches, counters and
    plain arrays are "non_trainable". What a pass records (`nnx.Intermediate`) and random streams
    (the `nnx.Rngs` that `nnx.Dropout` keeps) are in neither: each pass starts with zeros, and with
    streams that come of the step's key. A pass with a key sets every `deterministic` and
    `use_running_average` of the module to False, one without to True, as Flax's own `train()` and
    `eval()` do.

    Args:
      build: called with `rngs`, or with nothing where it takes none, returns the module; usually an
        `fdl.Partial` once built.
    """

    def __init__(self, build: Callable[..., nnx.Module]):
        if isinstance(build, linen.Module):
            raise ConfigError(_LINEN.format(type(build).__name__))
        if isinstance(build, nnx.Module) or not callable(build):
            kind = type(build).__name__
            name = kind if isinstance(build, nnx.Module) else "MyModule"
            raise ConfigError(
                f"The model is given as {kind} itself; wanted is what builds one for each key: "
                f"write fdl.Partial({name}, ...) in its place."
            )
        self.build = build

    @functools.cached_property
    def _split(self) -> _Split:
        graphdefs = []

        def state() -> nnx.State:
            module = self._built(0)
            for is_training in (True, False):
                graphdef, state = nnx.compat.split(_set_training(module, is_training))
                graphdefs.append(graphdef)
            return state

        # Not `nnx.eval_shape`: where a mesh is set, it takes every name of a split for an axis.
        with naming_the_layer():
            abstract_state = jax.eval_shape(state)
        return _Split(*graphdefs, list(nnx.to_flat_state(abstract_state)))

    def init(self, key: jax.Array) -> MdlVars:
        return mdl_vars_of(self._built(key))

    def weight_specs(self) -> MdlVars:
        return nested(
            self._split.leaves,
            lambda path, leaf: declared_spec(path_text((collection(leaf), *path)), leaf),
        )

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> nnx.Module:
        split = self._split
        streams = eval_key if key is None else key
        streams = jax.random.key(0) if streams is None else streams
        stored = traverse_util.flatten_dict(mdl_vars)

        def value(path: Path, leaf: Leaf) -> Any:
            if collection(leaf) is None:
                return fresh_value(path, leaf, streams)
            return stored[stored_at(path, leaf)]

        flat = [(path, _with_value(leaf, value(path, leaf))) for path, leaf in split.leaves]
        graphdef = split.evaluation if key is None else split.training
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    def non_trainable(self, module: nnx.Module) -> dict[str, Any]:
        """Returns the "non_trainable" variables as the pass through `module` left them.

        Raises:
          ConfigError: a variable's shape differs from the constructor's, or the pass made a
            weight; names the path.
        """
        before, after = dict(self._split.leaves), dict(leaves_of(module))
        for path, leaf in after.items():
            if path not in before and collection(leaf) == "params":
                raise ConfigError(
                    f"{path_text(path)}: the pass made this weight, which no learner trains. Make "
                    "it in the module's constructor."
                )
        kept = [item for item in before.items() if collection(item[1]) == "non_trainable"]
        return nested(kept, lambda path, leaf: _as_before(path, leaf, after[path]))["non_trainable"]

    def tallies(self, module: nnx.Module) -> dict[str, jax.Array]:
        return {
            path_text(path): value_of(leaf)
            for path, leaf in leaves_of(module) if isinstance(leaf, Tally)
        }

    def moved(self, params: dict[str, Any], sums: Mapping[str, jax.Array]) -> dict[str, Any]:
        if not sums:
            return params
        flat = traverse_util.flatten_dict(params)
        for path, leaf in self._split.leaves:
            if isinstance(leaf, Tally):
                weight = tuple(path_text((part,)) for part in (*path[:-1], leaf.moves))
                flat[weight] = leaf.rule(flat[weight], sums[path_text(path)])
        return traverse_util.unflatten_dict(flat)

    def abstract_module(self) -> nnx.Module:
        """Returns the module with shapes for arrays, for questions that need no weights."""
        return nnx.merge(self._split.training, nnx.from_flat_state(self._split.leaves))

    def _built(self, key: jax.Array | int) -> nnx.Module:
        # Flax would place a weight that declares a split at once: that needs a mesh that is set,
        # and dims that divide.
        with nnx.use_eager_sharding(False):
            module = self.build(rngs=nnx.Rngs(key)) if _takes_rngs(self.build) else self.build()
        if not isinstance(module, nnx.Module):
            raise ConfigError(_LINEN.format(type(module).__name__))
        _mark_arrays(module)
        for path, leaf in leaves_of(module):
            require_array(path, leaf)
        return module


def mdl_vars_of(module: nnx.Module) -> MdlVars:
    """Returns a module's variables as plain nested dicts with string keys."""

    def array(path: Path, leaf: Leaf) -> jax.Array:
        # With an explicit dtype: that of a Python number gives way to any other's.
        return jnp.asarray(value_of(leaf), jnp.result_type(value_of(leaf)))

    return nested(leaves_of(module), array)


def _as_before(path: Path, before: Leaf, after: Leaf) -> jax.Array:
    value, expected = jnp.asarray(value_of(after)), value_of(before)
    if value.shape != expected.shape:
        raise ConfigError(
            f"{path_text(path)}: the constructor made it of shape {expected.shape}, and a pass of "
            f"{value.shape}. A train step keeps it, so its shape must stay the same."
        )
    return value.astype(expected.dtype)


_LINEN = (
    "The model is built as a {}; wanted is a Flax NNX module. A Flax Linen module is given as "
    "fdl.Config(LinenModel, fdl.Config(...), ...), functions as fdl.Config(FunctionModel, ...)."
)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _takes_rngs(build: Callable[..., nnx.Module]) -> bool:
    """Returns True if `build` is to be called with `rngs`.

    Raises:
      ConfigError: it is given a setting that it does not take, or lacks one; names them.
    """
    function, settings, num_positional = build, set(), 0
    while isinstance(function, functools.partial):
        num_positional += len(function.args)
        function, settings = function.func, settings | set(function.keywords)
    name = getattr(function, "__name__", "the model")
    if isinstance(function, type):  # The signature of a module's class is *args, **kwargs.
        function = function.__init__
    if function is object.__init__:
        return False
    parameters = inspect.signature(function).parameters
    local = [parameter for parameter in parameters if parameter not in ("self", "rngs")]
    missing = [
        item for item in local[num_positional:]
        if item not in settings and parameters[item].default is inspect.Parameter.empty
        and parameters[item].kind not in _VARIADIC
    ]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := sorted(settings - set(parameters))):
        raise ConfigError(
            f"{name} has no setting '{unknown[0]}'; it has {', '.join(local) or 'none'}."
            f"{did_you_mean(unknown[0], local)}"
        )
    if missing:
        function_model = ""
        if inspect.isfunction(build):
            function_model = f" A function that returns weights: fdl.Config(FunctionModel, {name})."
        raise ConfigError(
            f"{name} lacks {', '.join(missing)}: set it in its config, such as "
            f"fdl.Partial({name}, {missing[0]}=...).{function_model}"
        )
    return takes_any or "rngs" in parameters


def _mark_arrays(module: nnx.Module) -> None:
    """Makes a module's plain arrays, such as a table of positions, leaves.

    Flax does so itself, except under a trace: there it takes them for structure, and the trace's
    values would leak.
    """
    for _, node in nnx.compat.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if is_traced(value):
                    setattr(node, name, nnx.data(value))


def _set_training(module: nnx.Module, is_training: bool) -> nnx.Module:
    """Returns a module with its dropout and batch norms set for a pass."""
    # What `Module.train` and `Module.eval` do, whatever a subclass calls by these names.
    nnx.Module.set_attributes(
        module, deterministic=not is_training, use_running_average=not is_training,
        raise_if_not_found=False, graph=True,
    )
    return module


class _GatheredWhenRead(nnx.Param):
    """Sharded parameter that is all-gathered on each read."""

    def get_value(self, *, index: Any = ...) -> jax.Array:
        value = self.get_metadata("gather")(super().get_value())
        return value if index is ... else value[index]

    def __getattr__(self, name: str) -> Any:
        metadata = object.__getattribute__(self, "_var_metadata")
        return metadata[name] if name in metadata else getattr(self.get_value(), name)


@functools.cache
def _gathered_when_read(kind: type[nnx.Param]) -> type[nnx.Param]:
    return type(kind)(f"Gathered{kind.__name__}", (_GatheredWhenRead, kind), {})


def _with_value(leaf: Leaf, value: Any) -> Leaf:
    if isinstance(value, ShardedWeight):
        if isinstance(leaf, nnx.Param):
            metadata = {**leaf.get_metadata(), "gather": value.gather}
            return _gathered_when_read(type(leaf)).from_metadata(value.block, metadata)
        value = value.whole()
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
