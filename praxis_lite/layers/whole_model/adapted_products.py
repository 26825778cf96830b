"""Matmuls for dense layers with LoRA or DoRA adapters."""

import dataclasses
import functools
import string
from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.core.sharding.devices.axis_types import type_spec, typed_as, untyped
from praxis_lite.layers.base.dense import Dense, Product
from praxis_lite.layers.base.result_types import einsum


@dataclasses.dataclass(frozen=True)
class DenseForm:
    """The subscripts of a dense layer's einsum equation, without leading dims.

    Attributes:
      inputs: Subscripts of the inputs.
      weight: Subscripts of the weight.
      leading: Subscripts that index the outputs of a layer with several outputs.
      outputs: Remaining subscripts of the outputs.
      stack: Subscripts of the weight that index independent layers, each with an adapter.
    """

    inputs: str
    weight: str
    leading: str
    outputs: str
    stack: str

    @property
    def rank(self) -> str:
        """The subscript of the adapter's rank dim: a letter that the equation does not contain."""
        return self._free()[0]

    @property
    def other_rank(self) -> str:
        """A second unused letter, for a product of two arrays that both have a rank dim."""
        return self._free()[1]

    def _free(self) -> list[str]:
        taken = self.inputs + self.weight + self.leading + self.outputs
        return [x for x in "rs" + string.ascii_letters if x not in taken]

    @property
    def contracted(self) -> str:
        """The contracted subscripts."""
        return "".join(x for x in self.weight if x in self.inputs and x not in self.stack)

    @property
    def a(self) -> str:
        """The subscripts of lora_a."""
        return self.stack + self.contracted + self.rank

    @property
    def b(self) -> str:
        """The subscripts of lora_b."""
        taken = self.stack + self.contracted
        return self.stack + self.rank + "".join(x for x in self.weight if x not in taken)

    @property
    def kept(self) -> str:
        """The output subscripts that also occur in the weight, in the outputs' order."""
        return "".join(x for x in self.leading + self.outputs if x in self.weight)

    @property
    def between(self) -> str:
        """The subscripts of `inputs @ a`."""
        rows = "".join(x for x in self.inputs if x not in self.contracted)
        return rows + "".join(x for x in self.stack if x not in rows) + self.rank


def form_of(layer: Dense) -> DenseForm:
    """Returns the subscripts of a dense layer's equation."""
    operands, outputs = layer.equation.split("->")
    inputs, weight = operands.replace("...", "").split(",")
    leading, _, outputs = outputs.rpartition("...")
    stack = "".join(x for x in weight if x in leading or x in inputs and x in outputs)
    return DenseForm(inputs, weight, leading, outputs, stack)


@dataclasses.dataclass(frozen=True)
class AdaptedProduct(Product):
    """The product of a dense layer, plus the product with two low-rank matrices.

    Attributes:
      base: The product with `w`.
      scale: Factor that multiplies the low-rank product.
      weights: Names of the adapter's weights in the layer.
    """

    base: Product
    scale: float
    weights: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b")

    def with_base(self, base: Product) -> Product:
        return dataclasses.replace(self, base=self.base.with_base(base))

    def kernel(self, layer: Dense) -> jax.Array:
        adapters = [getattr(layer, name)[...] for name in self.weights]
        return self.merge(layer, self.base.kernel(layer), *adapters)

    def merge(self, layer: Dense, w: jax.Array, *adapters: jax.Array) -> jax.Array:
        """Returns a weight or a stack of weights with the adapter merged in, in the weight's dtype.

        Args:
          layer: The layer that contains the weight.
          w: The weight [..., dims], with stacked dims first.
          adapters: The adapter's weights [..., dims], in the order of `weights`.
        """
        a, b = adapters
        form = form_of(layer)
        product = jnp.einsum(f"...{form.a},...{form.b}->...{form.weight}", a, b)
        return w + self.scale * product.reshape(w.shape).astype(w.dtype)

    def __call__(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        low_rank = self.low_rank_product(layer, inputs)
        outputs = self.base(layer, inputs)
        return outputs + typed_as(low_rank, outputs)

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        outputs = self.base.multiplied(layer, inputs)
        return outputs + typed_as(self.low_rank_product(layer, inputs), outputs)

    def low_rank_product(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        """Returns the scaled product of the inputs with the two low-rank matrices."""
        form = form_of(layer)
        a, b = (x.astype(inputs.dtype) for x in self._low_rank(layer))
        x = einsum(f"...{form.inputs},{form.a}->...{form.between}", inputs, a)
        outputs = f"{form.leading}...{form.outputs}"
        return einsum(f"...{form.between},{form.b}->{outputs}", x * self.scale, b)

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        a, b = self._low_rank(layer)
        x = inputs @ a.astype(inputs.dtype) * self.scale
        return [*self.base.factors(layer, inputs), (x, b)]

    def column_factors(self, layer: Dense) -> list[tuple[jax.Array, jax.Array | None]]:
        a, b = self._low_rank(layer)
        return [*self.base.column_factors(layer), (b.T, a.T * self.scale)]

    def _low_rank(self, layer: Dense) -> tuple[jax.Array, jax.Array]:
        """Returns the adapter's two matrices."""
        a, b = (getattr(layer, name)[...] for name in self.weights[:2])
        return a, b

    def is_sum_of_shards(self) -> bool:
        return self.base.is_sum_of_shards()


@dataclasses.dataclass(frozen=True)
class DecomposedProduct(AdaptedProduct):
    """DoRA's matmul, which learns the length of each column in the adapted weight.

    The current lengths are computed without storing w + a @ b: the squared lengths are sums of
    products of w, a and b.
    """

    weights: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b", "lora_m")

    def merge(self, layer: Dense, w: jax.Array, *adapters: jax.Array) -> jax.Array:
        *low_rank, _ = adapters
        form, lead = form_of(layer), w.shape[: low_rank[0].ndim - len(form_of(layer).a)]
        kernel = w.reshape(*lead, *layer.kernel_shape)
        scales = self._scales(form, kernel, *adapters)
        kernel = super().merge(layer, kernel, *low_rank)
        letters = f"...{form.weight},...{form.kept}->...{form.weight}"
        return jnp.einsum(letters, kernel, scales).reshape(w.shape).astype(w.dtype)

    def __call__(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        return layer.biased(self.multiplied(layer, inputs))

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        outputs = super().multiplied(layer, inputs)
        return (outputs * layer.reshape_for_broadcast(self._scales_of(layer), outputs)).astype(
            outputs.dtype
        )

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        scales = self._scales_of(layer)[None]
        return [(x, (w * scales).astype(w.dtype)) for x, w in super().factors(layer, inputs)]

    def column_factors(self, layer: Dense) -> list[tuple[jax.Array, jax.Array | None]]:
        scales = self._scales_of(layer)[:, None]
        return [(w * scales, a) for w, a in super().column_factors(layer)]

    def is_sum_of_shards(self) -> bool:
        return False

    def _scales_of(self, layer: Dense) -> jax.Array:
        adapters = [getattr(layer, name)[...] for name in self.weights]
        return self._scales(form_of(layer), self.base.kernel(layer), *adapters)

    def _scales(
        self, form: DenseForm, w: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array
    ) -> jax.Array:
        """Returns the learned length of each column, divided by the column's current length."""
        # JAX has no types for sums of products over split features.
        compute = functools.partial(self._scales_over_auto_axes, form)
        scales: jax.Array = untyped(compute, w, a, b, m, out=type_spec(m))
        return scales

    def _scales_over_auto_axes(
        self, form: DenseForm, w: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array
    ) -> jax.Array:
        dtype = jnp.promote_types(w.dtype, jnp.float32)
        w, a, b = (jax.lax.stop_gradient(x.astype(dtype)) for x in (w, a, b))
        r, s = form.rank, form.other_rank
        other_a, other_b, gram = form.a.replace(r, s), form.b.replace(r, s), form.stack + r + s

        def sum_products(results: str, *factors: tuple[str, jax.Array]) -> jax.Array:
            letters = ",".join(f"...{letters}" for letters, _ in factors)
            arrays = (x for _, x in factors)
            return jnp.einsum(f"{letters}->...{results}", *arrays, precision="highest")

        # The squared length of each column of w + scale ab, without computing ab, is |w|^2 + 2
        # scale w.ab + scale^2 |ab|^2.
        w_squares = sum_products(form.kept, (form.weight, w), (form.weight, w))
        a_by_w = sum_products(form.b, (form.a, a), (form.weight, w))
        cross_terms = sum_products(form.kept, (form.b, a_by_w), (form.b, b))
        a_by_a = sum_products(gram, (form.a, a), (other_a, a))
        ab_squares = sum_products(form.kept, (gram, a_by_a), (form.b, b), (other_b, b))
        squares = w_squares + self.scale * (2 * cross_terms + self.scale * ab_squares)
        lengths = jnp.sqrt(jnp.maximum(squares, jnp.finfo(dtype).tiny))
        # m is the learned change of the length of w.
        return (jnp.sqrt(w_squares) + m) / lengths
