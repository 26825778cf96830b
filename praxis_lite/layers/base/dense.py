"""Dense, the base class of dense layers; adapters and quantization can replace its matmul."""

import abc
import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from praxis_lite.core.sharding.split_dims import SplitDims, constrain
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, broadcast_as, xavier
from praxis_lite.layers.base.dims import CLASSES, NONE, matrix_of, merged_dim
from praxis_lite.layers.base.result_types import einsum
from praxis_lite.layers.base.variables import num_stacked_dims
from praxis_lite.layers.initializers import EinsumXavier


@dataclasses.dataclass(frozen=True)
class Product:
    """The matmul in a dense layer; this base class computes it unrounded, in the inputs' dtype.

    Subclasses round the operands or add an adapter. A product has settings but no arrays;
    additional weights belong to the layer. `layer.product = layer.product.with_base(other)`
    replaces the innermost product, which multiplies by `w`, and preserves adapters that have been
    added.
    """

    def with_base(self, base: "Product") -> "Product":
        """Returns this product with its innermost product replaced by `base`."""
        return base

    def kernel(self, layer: "Dense") -> jax.Array:
        """Returns the effective weight, with the equation's dims and the dtype of `w`."""
        return layer.kernel(layer.w.dtype)

    def __call__(self, layer: "Dense", inputs: jax.Array) -> jax.Array:
        """Evaluates the layer's einsum equation, and adds the bias, if any."""
        return layer.biased(self.multiplied(layer, inputs))

    def multiplied(self, layer: "Dense", inputs: jax.Array) -> jax.Array:
        """Evaluates the layer's einsum equation."""
        w = layer.w[...]
        if isinstance(w, StoredWeight):
            return w.multiplied(layer, inputs)
        return einsum(in_order(layer.equation), inputs, layer.kernel(inputs.dtype))

    def factors(self, layer: "Dense", inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Implements `Linear.factors`."""
        return [(inputs, self.kernel(layer))]

    def column_factors(self, layer: "Dense") -> list[tuple[jax.Array, jax.Array | None]]:
        """Implements `Linear.column_factors`."""
        return [(self.kernel(layer).T, None)]

    def is_sum_of_shards(self) -> bool:
        """Returns whether the product is the sum of the products of shards of contracted dims."""
        return True


@functools.cache
def in_order(equation: str) -> str:
    """Renames an equation's contracted subscripts to make them alphabetical in the weight.

    `jnp.einsum` contracts several dims in alphabetical order. If the weight has a different order,
    XLA copies the weight; in decoding, it makes a copy for every token.
    """
    operands, outputs = equation.split("->")
    weight = operands.split(",")[1]
    contracted = [letter for letter in weight if letter not in outputs]
    return equation.translate(str.maketrans("".join(contracted), "".join(sorted(contracted))))


class StoredWeight(abc.ABC):
    """Base class for weights that are not stored as a plain array."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Dtype of the represented weight."""

    def __getitem__(self, index: Any) -> Any:
        """Returns `self` for `[...]`, which reads a variable; otherwise an indexed array."""
        return self if index is ... else self.astype(self.dtype)[index]

    @abc.abstractmethod
    def astype(self, dtype: Any) -> jax.Array:
        """Returns the weight as an array."""

    @abc.abstractmethod
    def multiplied(self, layer: "Dense", inputs: jax.Array) -> jax.Array:
        """Implements `Product.multiplied`."""


class Dense(BaseLayer):
    """Computes an einsum of inputs and a weight `w`, plus a bias `b` if the layer has one.

    Subclasses set `equation`, and call `make` in the constructor. A dim of `w` may merge several
    subscripts of the equation. To reshape the outputs, override `postprocess_outputs`. Do not
    override `__call__`: adapters and quantization skip subclasses that do.

    Attributes:
      equation: Einsum equation of inputs and weight, such as "...d,df->...f". The bias has the dims
        that the weight contributes to the outputs.
      kernel_shape: Sizes of the weight's dims in the equation; -1 for a dim that may be sharded.
      product: The matmul of inputs and weight.
    """

    equation: str
    kernel_shape: tuple[int, ...]
    w: nnx.Param
    b: nnx.Param | None = None
    product: Product = Product()
    activation_split_dims_mapping: SplitDims = None

    def make(
        self,
        *dims: int,
        init: Initializer = xavier,
        bias_init: Initializer | None = None,
        merged: str = "",
        in_parts: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        """Creates `w`, and `b` if `bias_init` is given.

        Args:
          dims: Sizes of the weight's dims in `equation`, or the results of `self.dims`.
          init: Initializer of `w`.
          bias_init: Initializer of `b`.
          merged: Consecutive subscripts that form one dim of `w` and of `b`.
          in_parts: Subscript of the dim that tensor parallelism may shard.
          rngs: The random streams for initialization.
        """
        operands, outputs = self.equation.split("->")
        letters = operands.split(",")[1]
        dim_of = dict(zip(letters, dims, strict=True))
        self.kernel_shape = tuple(-1 if x == in_parts else int(dim_of[x]) for x in letters)
        # One entry per dim of `w`: a subscript, or all merged subscripts.
        groups = [merged if x in merged else x for x in letters if x not in merged[1:]]
        dim_of_group = {group: merged_dim(*(dim_of[x] for x in group)) for group in groups}
        matrix = matrix_of(self.equation, groups)
        if isinstance(init, EinsumXavier):
            leading = outputs.rpartition("...")[0]  # Subscripts that stack separate outputs.
            output_dims = [i for i in matrix.outputs if groups[i] not in leading]
            init = init.for_dims(matrix.contracted, output_dims)
        self.w = self.weight(tuple(dim_of_group.values()), init=init, matrix=matrix, rngs=rngs)
        # `b` has the dims of `w` that occur in the outputs, in the order of the outputs.
        if bias_init is not None:
            positions = sorted(outputs.index(group[0]) for group in groups if group[0] in outputs)
            bias_dims = tuple(
                dim
                for i in positions
                for group, dim in dim_of_group.items()
                if group[0] == outputs[i]
            )
            self.b = self.weight(bias_dims, init=bias_init, matrix=NONE, rngs=rngs)

    @property
    def letters(self) -> tuple[str, ...]:
        """The equation's subscripts for each dim of `w` except stacked dims; several if merged."""
        letters = self.equation.split("->")[0].split(",")[1]
        size_of = dict(zip(letters, self.kernel_shape, strict=True))
        shape, groups = self.w.shape[num_stacked_dims(self.w) :], []
        num_merged = 1 + len(letters) - len(shape)
        for size in shape:
            length = 1 if size_of[letters[0]] == size else num_merged
            groups.append(letters[:length])
            letters, num_merged = letters[length:], num_merged - length + 1
        return tuple(groups)

    @property
    def contracted_dims(self) -> tuple[int, ...]:
        """Negative indices of the contracted dims of `w`; () if a dim is only partly contracted."""
        outputs, groups = self.equation.split("->")[1], self.letters
        is_output = [{letter in outputs for letter in group} for group in groups]
        if any(len(flags) > 1 for flags in is_output):
            return ()
        return tuple(i - len(groups) for i, flags in enumerate(is_output) if flags == {False})

    @property
    def makes_logits(self) -> bool:
        """Whether the outputs are logits over classes or tokens."""
        return CLASSES in self.w.get_metadata().get("dim_names", ())

    def kernel(self, dtype: Any) -> jax.Array:
        """Returns the weight with the equation's dims."""
        # Cast first, so that the cast of the gradient is last and can move out of a scan
        # (narrow_scans).
        w = self.w[...].astype(dtype)
        return w if w.ndim == len(self.kernel_shape) else w.reshape(self.kernel_shape)

    def postprocess_outputs(self, outputs: jax.Array) -> jax.Array:
        """Constrains the sharding of the outputs; subclasses may reshape or split them."""
        return constrain(outputs, self.activation_split_dims_mapping)

    def biased(self, outputs: jax.Array) -> jax.Array:
        """Returns the outputs of the equation plus the bias, if any."""
        if self.b is None:
            return outputs
        return outputs + broadcast_as(self.reshape_for_broadcast(self.b[...], outputs), outputs)

    def reshape_for_broadcast(self, x: jax.Array, outputs: jax.Array) -> jax.Array:
        """Reshapes `x`, which has the weight's output dims, to broadcast to the outputs."""
        operands, results = self.equation.split("->")
        weight = operands.split(",")[1]
        size_of = dict(zip(weight, self.kernel_shape, strict=True))
        num_leading = outputs.ndim - len(results.replace("...", ""))
        # Other dims have size 1.
        shape = [size_of.get(dim, 1) for dim in results.replace("...", " " * num_leading)]
        return x.reshape(shape)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.postprocess_outputs(self.product(self, inputs))


def is_dense(layer: Any) -> bool:
    """Returns whether a layer is a Dense layer whose product can be replaced."""
    return isinstance(layer, Dense) and type(layer).__call__ is Dense.__call__
