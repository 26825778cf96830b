"""A Flax Linen module as its users write it, seen as plain nested dicts of arrays."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from praxis_lite.core.errors import require
from praxis_lite.core.models.model import MdlVars, Model, whole
from praxis_lite.core.sharding.weight_spec import WeightSpec
from praxis_lite.models.linen_boxes import (
    OwnShapes,
    boxed_spec,
    drawing_off_mesh,
    is_box,
    unboxed,
)
from praxis_lite.models.linen_inputs import (
    arguments_of,
    as_config_error,
    filled,
    flags_of,
    method_of,
)

PyTree = Any


class LinenModel(Model):
    """A Flax Linen module, unchanged.

    The collection "params" is what a learner may touch; every other one that `init` makes
    ("batch_stats", "cache") is "non_trainable", by its name, and mutable in training. What is
    sown is in neither. Weights in Flax's boxes declare how they split: `nn.with_partitioning` mesh
    axes, `nn.with_logical_partitioning` names for the job's rules. The state has bare arrays.

    Args:
      module: built, for instance an `fdl.Config` of its class.
      init_inputs: what `module.init` gets besides keys: a mapping by argument name, or a sequence
        by position, of shapes (float32), of pairs (dtype, shape), or of arrays:
        `{"x": (1, 28, 28), "ids": ("int32", (1, 16))}`. A flag of training that is not given says
        evaluation.
      eval_module: called instead of `module` in evaluation and decoding, with the same weights;
        for modules that have training as a setting, not as an argument.
      init_method: the method that creates all variables; None: `__call__`.
      sown_collections: dropped from the state besides "intermediates" and those to which calls
        append, as `sow` does by itself.

    Raises:
      ConfigError: from `weight_specs`: the module cannot be initialised with these inputs.
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
                isinstance(given, nn.Module), f"LinenModel.{name}", given,
                "a flax.linen Module that is built",
                "In an experiment that is an fdl.Config of its class, not an fdl.Partial.",
            )
        self.linen_module, self.eval_module = module, eval_module
        self.init_method = method_of(module, init_method)
        self._sown_collections = tuple(sown_collections)
        self._args, self._kwargs = arguments_of(init_inputs)

    def init(self, key: jax.Array) -> MdlVars:
        """Returns the result of `module.init({"params": key}, ...)`: its very numbers, unboxed."""
        return self._split(unboxed(self._init(key)))

    def weight_specs(self) -> MdlVars:
        return self._weight_specs

    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> "BoundLinen":
        # In evaluation a task hands keys on by itself (`rngs`): dropout that is not told that it is
        # evaluation then lacks a key, which is an error, instead of dropping.
        del eval_key
        module = self.linen_module if key is not None else self.eval_module
        mdl_vars, boxed = whole(mdl_vars), self._abstract[0]
        variables = {"params": mdl_vars["params"], **mdl_vars["non_trainable"]}
        kept = {name: boxed[name] for name in variables if name in boxed}
        return BoundLinen(module, _as(kept, variables), key)

    def non_trainable(self, module: "BoundLinen") -> dict[str, Any]:
        expected = self._weight_specs["non_trainable"]
        return _as(expected, {name: _plain(module.variables[name]) for name in expected})

    @functools.cached_property
    def _abstract(self) -> tuple[dict[str, Any], OwnShapes]:
        """What init returns, boxes and all, with shapes for arrays; and each weight's own shape."""
        args, kwargs = self._arguments()
        own_shapes: OwnShapes = {}
        with as_config_error(self.linen_module, "initialised with init_inputs", args, kwargs):
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
        """The collections that are not state: those to which another call would append."""
        named, before = {"intermediates", *self._sown_collections}, unboxed(self._abstract[0])
        if all(_is_nested_dict(tree) for tree in before.values()):
            return named

        def once_more(variables: dict[str, Any]) -> dict[str, Any]:
            args, kwargs = jax.tree.map(filled, self._arguments())
            return self.linen_module.apply(
                variables, *args, method=self.init_method, rngs={"params": jax.random.key(0)},
                mutable=nn.DenyList("params"), **kwargs,
            )[1]

        with nn.intercept_methods(drawing_off_mesh()):
            after = jax.eval_shape(once_more, before)
        grown = {
            name for name, tree in before.items()
            if name in after and jax.tree.structure(tree) != jax.tree.structure(after[name])
        }
        return named | grown

    def _arguments(self) -> tuple[tuple, dict[str, Any]]:
        flags = flags_of(self.init_method, self._args, self._kwargs, is_training=False)
        return self._args, {**self._kwargs, **flags}

    def _init(self, key: jax.Array, own_shapes: OwnShapes | None = None) -> dict[str, Any]:
        args, kwargs = jax.tree.map(filled, self._arguments())
        with nn.intercept_methods(drawing_off_mesh(own_shapes)):
            # Flax draws what other streams ask for, such as dropout's, from "params".
            return dict(
                self.linen_module.init({"params": key}, *args, method=self.init_method, **kwargs)
            )

    def _split(self, variables: Mapping[str, Any]) -> MdlVars:
        kept = {n: _plain(tree) for n, tree in variables.items() if n not in self._sown}
        return {"params": kept.pop("params", {}), "non_trainable": kept}


class BoundLinen:
    """A Linen module with its variables, for a pass: called as the module is.

    Attributes:
      linen_module: what is called.
      variables: by collection; after a call as it left them.
      sown: what the last call has sown, by collection, "intermediates" among them.
      key: of the pass; None: evaluation.
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
        """Returns the result of the module, or of a method of it.

        A flag that the method takes and that is not given is set: `train`, `training`,
        `is_training`, or `deterministic`, `use_running_average`. In training all collections but
        "params" are mutable, in evaluation only "cache" and what is sown.

        Args:
          method: its name, or the function; None: `__call__`.
          rngs: keys by stream. None: in evaluation no keys; in training "dropout" gets the pass's
            key, in a second call of the pass another, and other streams share one.

        Raises:
          ConfigError: Flax refuses the call, such as for a weight of another shape.
        """
        is_training = self.key is not None
        function = method_of(self.linen_module, method)
        kwargs |= flags_of(function, args, kwargs, is_training=is_training)
        if rngs is None and is_training:
            key, num_before = self.key, self._num_calls
            key = jax.random.fold_in(key, num_before) if num_before else key
            # Flax takes "params" for a stream that is missing.
            others = jax.random.fold_in(key, zlib.crc32(b"other streams"))
            rngs = {"dropout": key, "params": others}
        self._num_calls += 1
        fixed = ["params"] if is_training else [n for n in self.variables if n != "cache"]
        with (
            as_config_error(self.linen_module, "applied to", args, kwargs),
            nn.intercept_methods(drawing_off_mesh()),
        ):
            outputs, changed = self.linen_module.apply(
                self.variables, *args, method=function, rngs=rngs or {},
                mutable=nn.DenyList(tuple(fixed)), **kwargs,
            )
        for name, tree in changed.items():
            is_state = name == "cache" or name in self.variables
            (self.variables if is_state else self.sown)[name] = unboxed(tree)
        return outputs

    def clone(self, **settings: Any) -> "BoundLinen":
        """Returns the same weights in the module with other settings, such as `decode=True`."""
        return BoundLinen(self.linen_module.clone(**settings), dict(self.variables), self.key)


def _is_nested_dict(tree: PyTree) -> bool:
    return not isinstance(tree, tuple | list) and (
        not isinstance(tree, Mapping) or all(map(_is_nested_dict, tree.values()))
    )


def _plain(tree: PyTree) -> PyTree:
    """Returns nested dicts with string keys: a variable may be any container of arrays."""
    if isinstance(tree, Mapping):
        return {str(name): _plain(child) for name, child in tree.items()}
    if isinstance(tree, tuple | list):
        return {str(i): _plain(child) for i, child in enumerate(tree)}
    return tree


def _as(like: PyTree, plain: PyTree) -> PyTree:
    """Returns the leaves of `plain`, nested dicts, in the containers of `like`."""

    def leaf(path: tuple, _: Any) -> Any:
        node = plain
        for part in path:
            node = node[jax.tree_util.keystr((part,), simple=True)]
        return node

    return jax.tree.map_with_path(leaf, like, is_leaf=is_box)
