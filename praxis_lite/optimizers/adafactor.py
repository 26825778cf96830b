"""Adafactor as Pax has it: factored second moments, and a momentum that may be kept in int8.

Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018
(https://arxiv.org/abs/1804.04235).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import require_choice
from praxis_lite.core.learner.optimizer_factories import rate_at
from praxis_lite.core.learner.path_masks import Patterns, path_mask
from praxis_lite.optimizers.optimizer_settings import (
    require_decay_rates,
    require_not_negative,
    require_positive,
)

PyTree = Any
Shape = tuple[int, ...]
MOMENTUM_DTYPES = ("int8", "int16", "bfloat16", "float32")


class WeightSlots(NamedTuple):
    """The slots of a weight. A slot that it does not have is zeros of shape [1], as in Pax.

    So the state has the same leaves whatever is factored, and `slots.py` can compare states of
    other sizes. Orbax does not save empty arrays.

    Attributes:
      m: momentum, of the weight's shape.
      m_scale: of an integer momentum: the weight's shape without the first dim.
      vr, vc: row and column means of the second moment: the weight's shape without one dim.
      v: second moment of a weight that is not factored: its shape.
    """

    m: jax.Array
    m_scale: jax.Array
    vr: jax.Array
    vc: jax.Array
    v: jax.Array


class AdafactorState(NamedTuple):
    """The number of updates made, and a nested dict of each slot of `WeightSlots`."""

    count: jax.Array
    m: PyTree
    m_scale: PyTree
    vr: PyTree
    vc: PyTree
    v: PyTree


def adafactor(
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay_method: str,
    decay_adam: float = 0.0,
    decay_pow: float = 0.0,
    beta1: float = 0.0,
    quantized_dtype: str = "int8",
    clip_threshold: float | None = 1.0,
    factored: bool = True,
    sort_factored_second_moment_dims: bool = False,
    min_dim_size_to_factor: int = 128,
    multiply_by_parameter_scale: bool = False,
    epsilon1_grad_sq_reg: float = 1e-30,
    epsilon2_param_scale_reg: float = 1e-3,
    weight_decay: float | Mapping[str, float] | None = None,
    layerwise_adaptation: bool = False,
    exclude_from_layerwise_adaptation: Patterns = (),
    maybe_inf_to_nan: bool = True,
) -> optax.GradientTransformation:
    """Returns the Adafactor of Pax's `ShardedAdafactor`, its names and defaults; float32 updates.

    `optax.adafactor` makes the same steps with decay_method="pow", a float32 momentum, sorted dims
    and no weight decay. It has no "adam" decay, integer momentum or layer-wise adaptation, factors
    the two largest dims rather than the last two, and does not multiply its weight decay by the
    learning rate.

    Pax adds 1e-30 mean(gradient^2) to the decay rate and to the step size, to keep XLA from one
    fusion; that is left out, and shows with gradients of 1e9 and more. With sorted dims Pax
    normalizes the row statistics of some weights of three or more dims along another dim than the
    paper; here it is always along the second largest.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      decay_method: how the second moments forget. "adam": at rate `decay_adam`, with Adam's
        correction for the first steps; "pow": 1 - (update number)^-`decay_pow`.
      decay_adam: in (0, 1), for "adam".
      decay_pow: above 0, for "pow".
      beta1: decay of the momentum, an average of steps rather than of gradients; 0: no momentum.
      quantized_dtype: of the stored momentum: "float32", "bfloat16", or "int8" or "int16" with a
        float32 scale per column (the max over the first dim).
      clip_threshold: the most that the root mean square of a weight's step may be before the
        learning rate; None: no clipping.
      factored: keeps the second moments of a weight of rank 2 or more as row and column means.
      sort_factored_second_moment_dims: factors the two largest dims, rather than the last two.
      min_dim_size_to_factor: with sorted dims, weights whose second largest dim is smaller are not
        factored.
      multiply_by_parameter_scale: multiplies the learning rate by the weight's root mean square.
      epsilon1_grad_sq_reg: added to the squared gradients.
      epsilon2_param_scale_reg: the least scale of a weight.
      weight_decay: decoupled, times the learning rate; of all weights, or by pattern, of which the
        last one that matches from the start of a weight's path counts; None: no decay.
      layerwise_adaptation: scales each weight's step to the root mean square of the weight (LAMB,
        https://arxiv.org/abs/1904.00962).
      exclude_from_layerwise_adaptation: patterns, matched from the start of a weight's path.
      maybe_inf_to_nan: turns infinities into NaN, so that a division cannot hide them.

    Raises:
      ConfigError: a setting is out of its range, or a pattern is not a regular expression.
    """
    require_choice("adafactor: decay_method", decay_method, ("adam", "pow"))
    require_choice("adafactor: quantized_dtype", quantized_dtype, MOMENTUM_DTYPES)
    require_decay_rates("adafactor", beta1=beta1, decay_adam=decay_adam)
    require_not_negative("adafactor", epsilon2_param_scale_reg=epsilon2_param_scale_reg)
    decay = {"decay_adam": decay_adam} if decay_method == "adam" else {"decay_pow": decay_pow}
    clip = {} if clip_threshold is None else {"clip_threshold": clip_threshold}
    require_positive("adafactor", **decay, epsilon1_grad_sq_reg=epsilon1_grad_sq_reg, **clip)
    if not isinstance(weight_decay, Mapping):
        weight_decay = {} if weight_decay is None else {"": weight_decay}
    for pattern, value in weight_decay.items():
        name = f"weight_decay[{pattern!r}]" if pattern else "weight_decay"
        require_not_negative("adafactor", **{name: value})
    decayed = [(path_mask(include=pattern), value) for pattern, value in weight_decay.items()]
    adapted = path_mask(exclude=exclude_from_layerwise_adaptation)

    def dims_of(shape: tuple[int, ...]) -> tuple[int, int] | None:
        if not factored:
            return None
        return factored_dims(shape, sort_factored_second_moment_dims, min_dim_size_to_factor)

    def sticky(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isinf(x), jnp.nan, x) if maybe_inf_to_nan else x

    def choices_of(params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the weight decay of each weight, and True for each with an adapted step."""
        decays = jax.tree.map(lambda _: 0.0, params)
        for mask, value in decayed:
            decays = jax.tree.map(
                lambda is_in, old, value=value: value if is_in else old, mask(params), decays
            )
        return decays, adapted(params)

    def init(params: PyTree) -> AdafactorState:
        choices_of(params)  # For `collected_patterns`, which traces `init` alone.
        slots = jax.tree.map(
            lambda w: zero_slots(w.shape, dims_of(w.shape), quantized_dtype if beta1 else None),
            params,
        )
        return AdafactorState(jnp.zeros((), jnp.int32), *_tree_per_field(slots, WeightSlots))

    def update(
        updates: PyTree, state: AdafactorState, params: PyTree | None = None
    ) -> tuple[PyTree, AdafactorState]:
        if params is None:
            raise ValueError(optax.base.NO_PARAMS_MSG)
        rate = rate_at(learning_rate, state.count)
        decay = _second_moment_decay(decay_method, decay_adam, decay_pow, state.count)
        steps = jax.tree.map(
            lambda *of_weight: weight_step(rate, decay, *of_weight),
            updates, params, *choices_of(params), *state[1:],
        )  # fmt: skip
        updates, slots = _tree_per_field(steps, _Step)
        slots = _tree_per_field(slots, WeightSlots)
        return updates, AdafactorState(optax.safe_increment(state.count), *slots)

    def weight_step(
        rate: jax.Array, decay: jax.Array, grad: jax.Array, weight: jax.Array, weight_decay: float,
        is_adapted: bool, *slots: jax.Array,
    ) -> _Step:  # fmt: skip
        slots, weight = WeightSlots(*slots), weight.astype(jnp.float32)
        direction, slots = _normalized(
            sticky(grad.astype(jnp.float32)), slots, dims_of(weight.shape), decay,
            epsilon1_grad_sq_reg, sticky,
        )  # fmt: skip
        if clip_threshold is not None:
            direction /= sticky(jnp.maximum(1.0, _rms(direction) / clip_threshold))
        step_size = rate
        if multiply_by_parameter_scale:
            step_size *= jnp.maximum(_rms(weight), epsilon2_param_scale_reg)
        step = step_size * direction
        if beta1:
            step = sticky(beta1 * momentum_of(slots.m, slots.m_scale) + (1.0 - beta1) * step)
            m, m_scale = stored_momentum(step, quantized_dtype)
            slots = slots._replace(m=m, m_scale=m_scale)
        if weight_decay:
            step += weight_decay * rate * weight
        if layerwise_adaptation and is_adapted:
            weight_rms = _rms(weight)
            step_rms = _rms(step / step_size) + epsilon1_grad_sq_reg
            # A rate of 0 makes the step's 0 / 0, which is not above 0 either.
            step *= jnp.where((weight_rms > 0) & (step_rms > 0), weight_rms / step_rms, 1.0)
        return _Step(-step, slots)

    return optax.GradientTransformation(init, update)


class _Step(NamedTuple):
    """The update of a weight, and its new slots: `WeightSlots`."""

    update: jax.Array
    slots: WeightSlots


def _normalized(
    grad: jax.Array, slots: WeightSlots, dims: tuple[int, int] | None, decay: jax.Array,
    epsilon: float, sticky: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, WeightSlots]:
    """Returns the gradient over the root of its second moment, and the slots with that moment."""

    def averaged(old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1.0 - decay) * sticky(new)

    squared = jnp.square(grad) + epsilon
    if dims is None:
        v = averaged(slots.v, squared)
        return grad / jnp.sqrt(v), slots._replace(v=v)
    row_dim, column_dim = dims
    vr = averaged(slots.vr, jnp.mean(squared, row_dim))
    vc = averaged(slots.vc, jnp.mean(squared, column_dim))
    # The dim of vr that is the weight's column_dim.
    mean = jnp.mean(vr, column_dim - (column_dim > row_dim), keepdims=True)
    direction = (
        grad
        * jnp.expand_dims(1.0 / jnp.sqrt(vr / mean), row_dim)
        * jnp.expand_dims(1.0 / jnp.sqrt(vc), column_dim)
    )
    return direction, slots._replace(vr=vr, vc=vc)


def _second_moment_decay(
    method: str, decay_adam: float, decay_pow: float, count: jax.Array
) -> jax.Array:
    """Returns the share of the old second moment that is kept; 0 in the first update."""
    number = count.astype(jnp.float32) + 1.0
    if method == "pow":
        return 1.0 - number**-decay_pow
    beta2 = jnp.float32(decay_adam)
    return beta2 * (1.0 - beta2 ** (number - 1.0)) / (1.0 - beta2**number)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _tree_per_field(tree: PyTree, kind: type[NamedTuple]) -> list[PyTree]:
    """Returns, for each field of the named tuples in a tree, the tree of what they have there."""
    return [
        jax.tree.map(lambda item, i=i: item[i], tree, is_leaf=lambda x: isinstance(x, kind))
        for i in range(len(kind._fields))
    ]


def zero_slots(
    shape: Shape, dims: tuple[int, int] | None, momentum_dtype: str | None
) -> WeightSlots:
    """Returns the slots of a weight before the first update.

    Args:
      shape: of the weight.
      dims: the two that are factored, rows' statistics dropping the first; None: not factored.
      momentum_dtype: None: no momentum.
    """
    absent = jnp.zeros((1,), jnp.float32)
    if momentum_dtype is None:
        m, m_scale = absent, absent
    else:
        m, m_scale = stored_momentum(jnp.zeros(shape, jnp.float32), momentum_dtype)
    if dims is None:
        return WeightSlots(m, m_scale, absent, absent, jnp.zeros(shape, jnp.float32))
    vr, vc = (jnp.zeros(shape[:dim] + shape[dim + 1 :], jnp.float32) for dim in dims)
    return WeightSlots(m, m_scale, vr, vc, absent)


def factored_dims(shape: Shape, by_size: bool, min_size: int) -> tuple[int, int] | None:
    """Returns the dims that the row and the column statistics drop; None for no factoring.

    Args:
      by_size: the largest and second largest dims; else the last and the one before. Of equals
        the last counts as larger, as in optax, and `slots.py` relies on that; in Pax the first
        does, so that `vr` and `vc` of such a weight are the other way round.
      min_size: with `by_size`, the least size of both.
    """
    if len(shape) < 2:
        return None
    if not by_size:
        return len(shape) - 1, len(shape) - 2
    *_, second, largest = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    return (largest, second) if shape[second] >= min_size else None


def stored_momentum(m: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns (m, m_scale): a float32 momentum as it is kept.

    Integers are symmetric about 0, the largest of each column at the end of the range. A scalar
    has no column and stays float32.
    """
    if dtype in ("bfloat16", "float32"):
        return m.astype(dtype), jnp.zeros((1,), jnp.float32)
    if not m.ndim:
        return m, jnp.zeros((1,), jnp.float32)
    scale = jnp.max(jnp.abs(m), axis=0) / jnp.iinfo(dtype).max
    rounded = jnp.round(m / jnp.where(scale > 0, scale, 1.0)[None])
    return rounded.astype(dtype), scale


def momentum_of(m: jax.Array, m_scale: jax.Array) -> jax.Array:
    """Returns the float32 momentum of what `stored_momentum` returned."""
    if jnp.issubdtype(m.dtype, jnp.integer):
        return m.astype(jnp.float32) * m_scale[None]
    return m.astype(jnp.float32)
