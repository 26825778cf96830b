"""NnxModel: implements the model interface for a Flax NNX module."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.models.layer_paths import prefix_layer_path
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
    """The graphdefs of a module, for training and for evaluation, and its abstract leaves."""

    training: nnx.GraphDef[nnx.Module]
    evaluation: nnx.GraphDef[nnx.Module]
    leaves: list[tuple[Path, Leaf]]


class NnxModel(Model):
    """A `Model` that wraps a Flax NNX module.

    `nnx.Param` variables are "params", which a learner may update. Statistics, caches, counters and
    plain arrays are "non_trainable". Recorded values (`nnx.Intermediate`) and random streams (such
    as the `nnx.Rngs` of `nnx.Dropout`) belong to neither collection: in each forward pass, recorded
    values start as zeros, and streams are derived from the step's key. As with Flax's `train()` and
    `eval()`, all `deterministic` and `use_running_average` attributes are set to False in a forward
    pass with a key, and to True in a forward pass without a key.

    Args:
      build: Function that returns the module, usually a built `fdl.Partial`. It is called with
        `rngs` if it takes that argument. `weight_specs` calls it under `jax.eval_shape`, and `init`
        calls it again. Steps do not call it, but merge the module's structure with arrays.
    """

    def __init__(self, build: Callable[..., nnx.Module]):
        if isinstance(build, linen.Module):
            raise ConfigError(_LINEN.format(type(build).__name__))
        if isinstance(build, nnx.Module) or not callable(build):
            kind = type(build).__name__
            name = kind if isinstance(build, nnx.Module) else "MyModule"
            raise ConfigError(
                f"The model is an instance of {kind}; expected a function that builds the model. "
                f"Replace the instance with fdl.Partial({name}, ...)."
            )
        self.build = build

    def __repr__(self) -> str:
        return function_name(self.build).rpartition(".")[2]

    @functools.cached_property
    def _split(self) -> _Split:
        graphdefs: list[nnx.GraphDef[nnx.Module]] = []

        def state() -> nnx.State[Any, Any]:
            module = self._built(0)
            # The graph definition contains the mode, so training and evaluation have separate ones.
            for is_training in (True, False):
                graphdef, state = nnx.compat.split(_set_training(module, is_training))
                graphdefs.append(graphdef)
            return state

        # Do not use `nnx.eval_shape`, which treats logical names as mesh axes if a mesh is set.
        with prefix_layer_path():
            abstract_state = jax.eval_shape(state)
        training, evaluation = graphdefs
        return _Split(training, evaluation, list(nnx.to_flat_state(abstract_state)))

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
            # Variables outside of mdl_vars, such as random streams, get a new value in each call.
            if collection(leaf) is None:
                return fresh_value(path, leaf, streams)
            return stored[stored_at(path, leaf)]

        flat = [(path, _with_value(leaf, value(path, leaf))) for path, leaf in split.leaves]
        graphdef = split.evaluation if key is None else split.training
        module: nnx.Module = nnx.merge(graphdef, nnx.from_flat_state(flat))
        return module

    def non_trainable(self, module: nnx.Module) -> dict[str, Any]:
        """Returns the "non_trainable" variables after the forward pass through `module`.

        Raises:
          ConfigError: A variable's shape was changed in the pass, or a weight was created.
        """
        before, after = dict(self._split.leaves), dict(leaves_of(module))
        for path, leaf in after.items():
            if path not in before and collection(leaf) == "params":
                raise ConfigError(
                    f"{path_text(path)}: the forward pass created this weight, which no learner "
                    "trains. Create it in the module's constructor."
                )
        stored = [item for item in before.items() if collection(item[1]) == "non_trainable"]
        new = nested(stored, lambda path, leaf: _with_old_dtype(path, leaf, after[path]))
        non_trainable: dict[str, Any] = new["non_trainable"]
        return non_trainable

    def tallies(self, module: nnx.Module) -> dict[str, jax.Array]:
        return {
            path_text(path): value_of(leaf)
            for path, leaf in leaves_of(module)
            if isinstance(leaf, Tally)
        }

    def moved(self, params: dict[str, Any], sums: Mapping[str, jax.Array]) -> dict[str, Any]:
        if not sums:
            return params
        flat = traverse_util.flatten_dict(params)
        for path, leaf in self._split.leaves:
            if isinstance(leaf, Tally):
                # A Tally changes a weight of the same layer, which it refers to by name.
                weight = tuple(path_text((part,)) for part in (*path[:-1], leaf.moves))
                flat[weight] = leaf.rule(flat[weight], sums[path_text(path)])
        new: dict[str, Any] = traverse_util.unflatten_dict(flat)
        return new

    def abstract_module(self) -> nnx.Module:
        """Returns the module with shapes in place of arrays."""
        leaves = nnx.from_flat_state(self._split.leaves)
        module: nnx.Module = nnx.merge(self._split.training, leaves)
        return module

    def _built(self, key: jax.Array | int) -> nnx.Module:
        # With eager sharding, Flax would immediately shard weights that declare a sharding, which
        # requires a current mesh and even shards.
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
        # Pass an explicit dtype, because arrays created from Python scalars are weakly typed.
        return jnp.asarray(value_of(leaf), jnp.result_type(value_of(leaf)))

    return nested(leaves_of(module), array)


def _with_old_dtype(path: Path, before: Leaf, after: Leaf) -> jax.Array:
    value, expected = jnp.asarray(value_of(after)), value_of(before)
    if value.shape != expected.shape:
        raise ConfigError(
            f"{path_text(path)}: the constructor created the shape {expected.shape}, but the "
            f"forward pass assigned the shape {value.shape}. Shapes of variables in the state must "
            "not change."
        )
    return value.astype(expected.dtype)


_LINEN = (
    "The model is a {}; expected a Flax NNX module. Wrap a Flax Linen module in "
    "fdl.Config(LinenModel, fdl.Config(...), ...), or functions in fdl.Config(FunctionModel, ...)."
)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _takes_rngs(build: Callable[..., nnx.Module]) -> bool:
    """Returns whether `build` takes an `rngs` argument.

    Raises:
      ConfigError: A keyword of a partial is not a parameter of the function, a parameter is set by
        position and by name, or a required argument is missing.
    """
    function: Callable[..., object] = build
    settings, num_positional = set[str](), 0
    # Collect the arguments that nested partials already set.
    while isinstance(function, functools.partial):
        num_positional += len(function.args)
        settings |= set(function.keywords)
        function = function.func
    name = getattr(function, "__name__", "the model")
    if isinstance(function, type):  # The signature of a module class itself is *args, **kwargs.
        function = function.__init__  # type: ignore[misc]  # Accessed on the class.
    if function is object.__init__:
        return False
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name not in ("self", "rngs")]
    missing = [
        name
        for name in names[num_positional:]
        if name not in settings
        and parameters[name].default is inspect.Parameter.empty
        and parameters[name].kind not in _VARIADIC
    ]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := sorted(settings - set(parameters))):
        raise ConfigError(
            f"{name} has no setting '{unknown[0]}'; it has {', '.join(names) or 'no settings'}."
            f"{did_you_mean(unknown[0], names)}"
        )
    if twice := [name for name in names[:num_positional] if name in settings]:
        raise ConfigError(
            f"{name}: the config passes {twice[0]} by position and by name. Pass it by name only, "
            f"such as fdl.Partial({name}, {twice[0]}=...)."
        )
    if missing:
        function_model = ""
        if inspect.isfunction(build):
            function_model = f" If it returns weights, use fdl.Config(FunctionModel, {name})."
        raise ConfigError(
            f"{name} requires {' and '.join(missing)}. Set "
            f"{'it' if len(missing) == 1 else 'them'} in the config, such as "
            f"fdl.Partial({name}, {missing[0]}=...).{function_model}"
        )
    return takes_any or "rngs" in parameters


def _mark_arrays(module: nnx.Module) -> None:
    """Marks a module's plain arrays, such as a table of positions, as leaves.

    Flax does this too, but not while tracing. Without this function, Flax would then treat tracers
    as structure and leak them.
    """
    for _, node in nnx.compat.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if is_traced(value):
                    setattr(node, name, nnx.data(value))


def _set_training(module: nnx.Module, is_training: bool) -> nnx.Module:
    """Sets the training mode of a module's dropout and batch norm layers; returns the module."""
    # Do not call `Module.train` and `Module.eval`, because subclasses may override them.
    nnx.Module.set_attributes(
        module,
        deterministic=not is_training,
        use_running_average=not is_training,
        raise_if_not_found=False,
        graph=True,
    )
    return module


class _GatheredWhenRead(nnx.Param[Any]):
    """A sharded parameter that is all-gathered on each read."""

    def get_value(self, *, index: Any = ...) -> jax.Array:
        value: jax.Array = self.get_metadata("gather")(super().get_value())
        return value if index is ... else value[index]

    def __getattr__(self, name: str) -> Any:
        metadata = object.__getattribute__(self, "_var_metadata")
        return metadata[name] if name in metadata else getattr(self.get_value(), name)


@functools.cache
def _gathered_when_read(kind: type[nnx.Param[Any]]) -> type[nnx.Param[Any]]:
    metaclass: Callable[..., type[nnx.Param[Any]]] = type(kind)
    return metaclass(f"Gathered{kind.__name__}", (_GatheredWhenRead, kind), {})


def _with_value(leaf: Leaf, value: Any) -> Leaf:
    if isinstance(value, ShardedWeight):
        # A Param gathers its blocks when a layer reads it. Other variables are gathered here.
        if isinstance(leaf, nnx.Param):
            metadata = {**leaf.get_metadata(), "gather": value.gather}
            return _gathered_when_read(type(leaf)).from_metadata(value.block, metadata)
        value = value.gathered()
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
