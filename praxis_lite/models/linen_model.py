"""A Flax Linen module as a `Model`, with variables as plain nested dicts of arrays."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from praxis_lite.core.errors import require
from praxis_lite.core.models.model import MdlVars, Model, gather_sharded
from praxis_lite.core.sharding.weight_spec import WeightSpec
from praxis_lite.models.linen_boxes import (
    OwnShapes,
    boxed_spec,
    initialize_off_mesh,
    is_box,
    unbox,
)
from praxis_lite.models.linen_inputs import (
    as_config_error,
    example_array,
    init_arguments,
    resolve_method,
    training_flags,
)

PyTree = Any


class LinenModel(Model):
    """Wraps an unmodified Flax Linen module.

    A learner can train only the collection "params". Every other collection that `init` creates
    ("batch_stats", "cache") is stored under its name in "non_trainable", and is mutable in
    training. Sown values are not part of the state. Weights in Flax's boxes declare how they are
    sharded: `nn.with_partitioning` specifies mesh axes, and `nn.with_logical_partitioning`
    specifies names for the job's rules. The state contains arrays without boxes.

    Args:
      module: An instance, for example an `fdl.Config` of its class.
      init_inputs: The inputs of `module.init` except keys: a dict keyed by argument name, or a
        sequence of positional inputs, with shapes (float32), pairs (dtype, shape) or arrays, such
        as `{"x": (1, 28, 28), "ids": ("int32", (1, 16))}`. Training flags default to evaluation.
      eval_module: A module that replaces `module` in evaluation and decoding, with the same
        weights; for modules where training is a setting instead of an argument.
      init_method: Name of the method that creates all variables. If None, `__call__`.
      sown_collections: Collections to drop from the state, in addition to "intermediates" and
        collections that grow with every call, which `sow` creates by default.

    Raises:
      ConfigError: From `weight_specs`: the module cannot be initialized with these inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        init_inputs: Any,
        *,
        eval_module: nn.Module | None = None,
        init_method: str | None = None,
        sown_collections: Sequence[str] = (),
    ):
        eval_module = module if eval_module is None else eval_module
        for name, given in (("module", module), ("eval_module", eval_module)):
            require(
                isinstance(given, nn.Module),
                f"LinenModel.{name}",
                given,
                "an instance of flax.linen.Module",
                "In an experiment, this is an fdl.Config of its class, not an fdl.Partial.",
            )
        self.linen_module, self.eval_module = module, eval_module
        self.init_method = resolve_method(module, init_method)
        self._sown_collections = tuple(sown_collections)
        self._args, self._kwargs = init_arguments(init_inputs)

    def __repr__(self) -> str:
        return f"LinenModel({type(self.linen_module).__name__})"

    def init(self, key: jax.Array) -> MdlVars:
        """Returns the result of `module.init({"params": key}, ...)`, without boxes."""
        return self._split(unbox(self._init(key)))

    def weight_specs(self) -> MdlVars:
        return self._weight_specs

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> "BoundLinen":
        # In evaluation, the task passes keys explicitly (`rngs`). If a module still applies dropout
        # in evaluation, the missing key raises an error.
        del eval_key
        module = self.linen_module if key is not None else self.eval_module
        mdl_vars, boxed = gather_sharded(mdl_vars), self._abstract[0]
        variables = {"params": mdl_vars["params"], **mdl_vars["non_trainable"]}
        like = {name: boxed[name] for name in variables if name in boxed}
        return BoundLinen(module, _restructure(like, variables), key)

    def non_trainable(self, module: "BoundLinen") -> dict[str, Any]:
        expected = self._weight_specs["non_trainable"]
        return _restructure(expected, {name: _plain(module.variables[name]) for name in expected})

    @functools.cached_property
    def _abstract(self) -> tuple[dict[str, Any], OwnShapes]:
        """The variables from init as boxed shapes, and the shape of each weight in its layer."""
        args, kwargs = self._arguments()
        own_shapes: OwnShapes = {}
        with as_config_error(self.linen_module, "initialized with init_inputs", args, kwargs):
            boxed = jax.eval_shape(lambda: self._init(jax.random.key(0), own_shapes))
        return boxed, own_shapes

    @functools.cached_property
    def _weight_specs(self) -> MdlVars:
        boxed, own_shapes = self._abstract

        def spec(path: tuple, leaf: Any) -> WeightSpec:
            names = tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
            return boxed_spec("/".join(names), leaf, own_shapes.get(names))

        return self._split(jax.tree.map_with_path(spec, boxed, is_leaf=is_box))

    @functools.cached_property
    def _sown(self) -> set[str]:
        """The collections that are not part of the state, because they grow with every call."""
        named, before = {"intermediates", *self._sown_collections}, unbox(self._abstract[0])
        if all(_is_nested_dict(tree) for tree in before.values()):
            return named

        def call_again(variables: dict[str, Any]) -> Mapping[str, Any]:
            args, kwargs = jax.tree.map(example_array, self._arguments())
            return self.linen_module.apply(
                variables,
                *args,
                method=self.init_method,
                rngs={"params": jax.random.key(0)},
                mutable=nn.DenyList("params"),
                **kwargs,
            )[1]

        with nn.intercept_methods(initialize_off_mesh()):
            after = jax.eval_shape(call_again, before)
        # JAX's type annotations for tree structures refer to a module that does not exist.
        grown = {
            name
            for name, tree in before.items()
            if name in after and jax.tree.structure(tree) != jax.tree.structure(after[name])  # type: ignore[operator]
        }
        return named | grown

    def _arguments(self) -> tuple[tuple, dict[str, Any]]:
        flags = training_flags(self.init_method, self._args, self._kwargs, is_training=False)
        return self._args, {**self._kwargs, **flags}

    def _init(self, key: jax.Array, own_shapes: OwnShapes | None = None) -> dict[str, Any]:
        args, kwargs = jax.tree.map(example_array, self._arguments())
        with nn.intercept_methods(initialize_off_mesh(own_shapes)):
            # For streams without a key, such as "dropout", Flax uses the key "params".
            return dict(
                self.linen_module.init({"params": key}, *args, method=self.init_method, **kwargs)
            )

    def _split(self, variables: Mapping[str, Any]) -> MdlVars:
        state = {n: _plain(tree) for n, tree in variables.items() if n not in self._sown}
        return {"params": state.pop("params", {}), "non_trainable": state}


class BoundLinen:
    """A Linen module bound to its variables for one pass; call it like the module.

    Attributes:
      linen_module: The module.
      variables: The variables, keyed by collection; calls update them.
      sown: The values sown in the last call, keyed by collection, including "intermediates".
      key: Random key of the pass; None in evaluation.
    """

    def __init__(self, linen_module: nn.Module, variables: dict[str, Any], key: jax.Array | None):
        self.linen_module, self.variables, self.key = linen_module, variables, key
        self.sown: dict[str, Any] = {}
        self._num_calls = 0

    def __call__(
        self,
        *args: Any,
        method: str | Callable[..., Any] | None = None,
        rngs: Mapping[str, jax.Array] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the module or one of its methods, and returns the result.

        Training flags that the method accepts and the caller does not pass are set: `train`,
        `training`, `is_training`, `deterministic` and `use_running_average`. In training, all
        collections except "params" are mutable. In evaluation, only "cache" and the sown
        collections are mutable.

        Args:
          args: Positional arguments of the method.
          method: Name of a method, or a function. If None, `__call__`.
          rngs: Random keys of the streams. If None, evaluation has no keys, and in training,
            "dropout" receives the key of the pass (a different key in each call), and all other
            streams share another key.
          kwargs: Keyword arguments of the method.

        Raises:
          ConfigError: Flax raised an error, for example because a weight has the wrong shape.
        """
        is_training = self.key is not None
        function = resolve_method(self.linen_module, method)
        kwargs |= training_flags(function, args, kwargs, is_training=is_training)
        if rngs is None and self.key is not None:
            key, num_before = self.key, self._num_calls
            key = jax.random.fold_in(key, num_before) if num_before else key
            # For missing streams, Flax uses the key "params".
            others = jax.random.fold_in(key, zlib.crc32(b"other streams"))
            rngs = {"dropout": key, "params": others}
        self._num_calls += 1
        # All collections that are not listed here are mutable.
        fixed = ["params"] if is_training else [n for n in self.variables if n != "cache"]
        with (
            as_config_error(self.linen_module, "applied to", args, kwargs),
            nn.intercept_methods(initialize_off_mesh()),
        ):
            outputs, changed = self.linen_module.apply(
                self.variables,
                *args,
                method=function,
                rngs=dict(rngs or {}),
                mutable=nn.DenyList(tuple(fixed)),
                **kwargs,
            )
        for name, tree in changed.items():
            # Other collections that appear in a pass are sown values, which the next pass does not
            # read.
            is_state = name == "cache" or name in self.variables
            (self.variables if is_state else self.sown)[name] = unbox(tree)
        return outputs

    def clone(self, **settings: Any) -> "BoundLinen":
        """Returns a copy with the same weights and changed settings, such as `decode=True`."""
        return BoundLinen(self.linen_module.clone(**settings), dict(self.variables), self.key)


def _is_nested_dict(tree: PyTree) -> bool:
    return not isinstance(tree, tuple | list) and (
        not isinstance(tree, Mapping) or all(map(_is_nested_dict, tree.values()))
    )


def _plain(tree: PyTree) -> PyTree:
    """Converts a variable, which may be any container of arrays, to nested dicts of arrays."""
    if isinstance(tree, Mapping):
        return {str(name): _plain(child) for name, child in tree.items()}
    if isinstance(tree, tuple | list):
        return {str(i): _plain(child) for i, child in enumerate(tree)}
    return tree


def _restructure(like: PyTree, plain: PyTree) -> PyTree:
    """Moves the leaves of the nested dicts `plain` into the containers of `like`."""

    def leaf(path: tuple, _: Any) -> Any:
        node = plain
        for part in path:
            node = node[jax.tree_util.keystr((part,), simple=True)]
        return node

    return jax.tree.map_with_path(leaf, like, is_leaf=is_box)
