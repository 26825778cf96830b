"""The base of all layers: declarations of weights, and splits that travel with them.

And of dense layers, whose product can be replaced: adapters and rounding of a whole model are other
products. What their weights are called, and all else that they do, stays.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.sharding.split_dims import DimSplit, SplitDims, constrain
from praxis_lite.layers.calls import ConstructorSignature, checked_and_named
from praxis_lite.layers.initializers import WeightInit

Tree = TypeVar("Tree")
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

xavier = WeightInit.Xavier()  # Pax's default.
zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


class BaseLayer(nnx.Module):
    """A Flax NNX module, used as a pytree, whose weights declare how they split.

    Subclasses create weights with `self.weight` and sublayers in the constructor, and compute in
    `__call__`. They take keys and caches as arguments and return new ones: nothing mutates. What
    `__call__` and public methods compute carries the layer's path in the compiled program.

    Raises:
      ConfigError: a setting is out of its range, or does not go with another; names the class and
        the setting, before anything compiles. Or a method got a keyword that it does not know;
        names the nearest.
    """

    __signature__ = ConstructorSignature()
    # What of it is more than a sum over rows, such as "batch statistics"; for --mode=check.
    couples_rows: str | None = None
    # Of it, what lets a token depend on later ones of its row, such as "seats that tokens compete
    # for"; None in attention, whose mask says it.
    couples_tokens: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and isinstance(member, FunctionType):
                setattr(cls, name, checked_and_named(member))

    def weight(
        self,
        shape: tuple[int, ...],
        split_dims_mapping: SplitDims = None,
        *,
        init: Initializer = xavier,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> nnx.Param:
        """Returns a trainable weight drawn by `init` at its logical, unpadded shape."""
        value = init(rngs.params(), tuple(shape), dtype)
        # Our own metadata key: Flax applies its own (`sharding`, `out_sharding`) eagerly and raises
        # on a dim that does not divide.
        return nnx.Param(value, split_dims_mapping=split_dims_mapping)


def broadcast_as(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `weight` (float32) in the shape and dtype of `like`."""
    # Cast after the broadcast: its gradient, a sum over all tokens for a bias, is then summed in
    # float32. In bfloat16 it would stop growing, for 256 + 1 is 256 there.
    return jnp.broadcast_to(weight, like.shape).astype(like.dtype)


def filled_up(x: jax.Array, length: int, dim: int = 0, **settings: Any) -> jax.Array:
    """Returns `x` with zeros at the end of a dim, or as `settings` of `jnp.pad` say."""
    missing = length - x.shape[dim]
    widths = [(0, missing if d == dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths, **settings) if missing else x


def to_multiple(x: jax.Array, size: int, dim: int = 0, **settings: Any) -> jax.Array:
    """Returns `x`, `filled_up` to the next multiple of `size`."""
    return filled_up(x, -(-x.shape[dim] // size) * size, dim, **settings)


@dataclasses.dataclass(frozen=True)
class Product:
    """How a dense layer multiplies its inputs and its weight: exactly, in the inputs' dtype.

    A subclass multiplies in another way. It is a setting, without arrays of its own: weights that
    it needs are the layer's.
    """

    def __call__(self, layer: "Dense", inputs: jax.Array) -> jax.Array:
        """Returns the outputs of the layer's equation, and any bias."""
        return layer.biased(self.multiplied(layer, inputs))

    def multiplied(self, layer: "Dense", inputs: jax.Array) -> jax.Array:
        """Returns the outputs of the layer's equation."""
        w = layer.w[...]
        if isinstance(w, StoredWeight):
            return w.multiplied(layer, inputs)
        return jnp.einsum(in_order(layer.equation), inputs, layer.kernel(inputs.dtype))

    def factors(self, layer: "Dense", inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the answer of `Linear.factors`."""
        return [(inputs, layer.w[...].astype(layer.w.dtype))]

    def column_factors(self, layer: "Dense") -> list[tuple[jax.Array, jax.Array | None]]:
        """Returns the answer of `Linear.column_factors`."""
        return [(layer.w[...].astype(layer.w.dtype).T, None)]

    def adds_up(self) -> bool:
        """Returns True if products of parts of the summed dims add up to the product."""
        return True


@functools.cache
def in_order(equation: str) -> str:
    """Returns an equation of inputs and a weight that sums over the weight's dims as they lie.

    `jnp.einsum` sums over several dims in the order of their letters. Where that is another one XLA
    copies the weight, in decoding for each token.
    """
    operands, outputs = equation.split("->")
    weight = operands.split(",")[1]
    summed = [letter for letter in weight if letter not in outputs]
    return equation.translate(str.maketrans("".join(summed), "".join(sorted(summed))))


class StoredWeight(abc.ABC):
    """A weight that decoding keeps as something else than an array."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the weight that it stands for."""

    def __getitem__(self, index: Any) -> Any:
        """Returns the weight itself for `...`, as a variable reads it, else a part as an array."""
        return self if index is ... else self.astype(self.dtype)[index]

    @abc.abstractmethod
    def astype(self, dtype: Any) -> jax.Array:
        """Returns the weight as an array."""

    @abc.abstractmethod
    def multiplied(self, layer: "Dense", inputs: jax.Array) -> jax.Array:
        """Returns the answer of `Product.multiplied`."""


class Dense(BaseLayer):
    """Returns the einsum of inputs and a weight `w`, plus any bias `b` of the layer.

    A subclass sets the attributes. Its `w` may have dims of the equation merged. To be adapted and
    rounded it keeps `__call__`; the shape of the results it changes in `finished`.

    Attributes:
      equation: of inputs and weight, "...d,df->...f". The dims that the weight gives to the
        outputs are those of the bias.
      kernel_shape: a size for each of the weight's letters; -1 where a device may hold a part.
      product: how the two are multiplied.
    """

    equation: str
    kernel_shape: tuple[int, ...]
    w: nnx.Param
    b: nnx.Param | None = None
    product: Product = Product()
    activation_split_dims_mapping: SplitDims = None

    def kernel(self, dtype: Any) -> jax.Array:
        """Returns the weight in the equation's dims."""
        # Cast first: its gradient is then cast last, after a scan (core/partitioner/narrow_scans).
        w = self.w[...].astype(dtype)
        return w if w.ndim == len(self.kernel_shape) else w.reshape(self.kernel_shape)

    def finished(self, outputs: jax.Array) -> Any:
        """Returns the results of `__call__`, given the sum of product and bias."""
        return constrain(outputs, self.activation_split_dims_mapping)

    def biased(self, outputs: jax.Array) -> jax.Array:
        """Returns the outputs of the equation plus any bias."""
        if self.b is None:
            return outputs
        return outputs + broadcast_as(self.beside(outputs, self.b[...]), outputs)

    def beside(self, outputs: jax.Array, x: jax.Array) -> jax.Array:
        """Returns an array of the dims that the weight gives to the outputs, to broadcast there."""
        operands, results = self.equation.split("->")
        weight = operands.split(",")[1]
        size_of = dict(zip(weight, self.kernel_shape, strict=True))
        num_leading = outputs.ndim - len(results.replace("...", ""))
        # Dims that the weight does not give are 1.
        shape = [size_of.get(dim, 1) for dim in results.replace("...", " " * num_leading)]
        return x.reshape(shape)

    def __call__(self, inputs: jax.Array) -> Any:
        return self.finished(self.product(self, inputs))


def is_dense(layer: Any) -> bool:
    """Returns True if a layer computes as Dense says, so that its product can be replaced."""
    return isinstance(layer, Dense) and type(layer).__call__ is Dense.__call__


class AuxLoss(nnx.Intermediate):
    """A scalar that a pass adds to the training loss, such as a router's load balance.

    Intermediates are declared in the constructor, as zeros, and set by each pass. They are neither
    trained nor kept: a step starts from zeros, and checkpoints leave them out.
    """


class Summary(nnx.Intermediate):
    """A scalar that a pass reports, such as the share of tokens that a router dropped."""


def intermediates(module: nnx.Module, kind: type[nnx.Variable]) -> dict[str, jax.Array]:
    """Returns by path a pass's values in the variables of `kind`: [layers] in a stack."""
    return {
        "/".join(map(str, path)): node.get_value()
        for path, node in nnx.iter_graph(module)
        if isinstance(node, kind)
    }


def aux_loss(module: nnx.Module) -> jax.Array | None:
    """Returns the sum of a pass's AuxLoss variables, or None if it left none."""
    losses = intermediates(module, AuxLoss).values()
    return sum((jnp.sum(x) for x in losses), start=jnp.zeros(())) if losses else None


def assigned_values(module: nnx.Module) -> dict[tuple, jax.Array]:
    """Returns by path the value of each variable that a pass may assign: all but the weights.

    What is assigned inside `jax.lax.scan` or `jax.checkpoint` stays there unless returned: a layer
    that calls others inside one returns this and gives it to `assign`.
    """
    return {
        path: node.get_value()
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)
    }


def assign(module: nnx.Module, values: dict[tuple, jax.Array]) -> None:
    """Assigns `values` of `assigned_values` to the variables of `module`."""
    for path, node in nnx.iter_graph(module):
        if path in values:
            node.set_value(values[path])


def rebuilt(module: Tree) -> Tree:
    """Returns a copy of a module whose variables the body of a scan or loop may assign to.

    That body is a trace of its own, in which Flax refuses to assign to a module from outside. What
    is assigned to the copy stays there.
    """
    return jax.tree.map(lambda x: x, module)


def variables(module: nnx.Module) -> Iterator[nnx.Variable]:
    """Yields each variable of a module once."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield node


def stacked(
    module: nnx.Module, stack_split: DimSplit, *, num_dims_apart: int = 0
) -> nnx.Module:
    """Returns `module`, whose arrays got a leading dim by `jax.vmap`, with that dim declared.

    Args:
      stack_split: how the dim splits.
      num_dims_apart: of so many of its stacked dims the layer that calls `module` takes
        `LayersApart` too, in decoding.
    """
    for variable in variables(module):
        inner = variable.get_metadata().get("stack_split_dims_mapping", ())
        variable.set_metadata(
            stack_split_dims_mapping=(stack_split, *inner), num_dims_apart=num_dims_apart
        )
    return module
