"""Adafactor as in Pax, with factored second moments and an optional int8 momentum.

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
    """Slots of a weight; as in Pax, unused slots are zeros of shape [1].

    The state thus has the same leaves for all settings, and `slots.py` can compare states of
    different sizes. Empty arrays are not possible, because Orbax does not save them.

    Attributes:
      m: Momentum, with the shape of the weight.
      m_scale: Scales of an integer momentum, with the shape of the weight without its first dim.
      vr: Row means of the second moment: the mean over one of the two factored dims.
      vc: Column means of the second moment: the mean over the other factored dim.
      v: Unfactored second moment, with the shape of the weight.
    """

    m: jax.Array
    m_scale: jax.Array
    vr: jax.Array
    vc: jax.Array
    v: jax.Array


class AdafactorState(NamedTuple):
    """The number of updates, and a nested dict for each field of `WeightSlots`."""

    count: jax.Array  # type: ignore[assignment]  # Hides tuple.count, as in optax.
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
    """Returns Pax's `ShardedAdafactor`, with Pax's setting names and defaults.

    Updates are float32 for weights of any dtype.

    `optax.adafactor` computes the same steps with decay_method="pow", a float32 momentum, sorted
    dims and no weight decay. It does not support "adam" decay, an integer momentum or layer-wise
    adaptation, factors the two largest dims instead of the last two, and does not multiply its
    weight decay by the learning rate.

    Pax adds 1e-30 mean(gradient^2) to the decay rate and to the step size, to prevent a fusion in
    XLA. This implementation omits the term, which matters only for gradients of 1e9 or more. With
    sorted dims, Pax normalizes the row statistics of some weights of rank 3 or more along a
    different dim than in the paper. This implementation always uses the second largest dim.

    Args:
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      decay_method: Decay of second moments: "adam" for the rate `decay_adam` with Adam's bias
        correction, or "pow" for the rate 1 - (update number)^-`decay_pow`.
      decay_adam: Rate for "adam", in (0, 1).
      decay_pow: Power for "pow", above 0.
      beta1: Decay of the momentum, which averages steps rather than gradients, or 0 for no
        momentum.
      quantized_dtype: Dtype of the stored momentum: "float32", "bfloat16", "int8" or "int16".
        Integer dtypes have a float32 scale per column (the maximum over the first dim).
      clip_threshold: Maximum root mean square of a weight's step before the learning rate is
        applied, or None for no clipping.
      factored: Whether to store second moments of weights with two or more dims as row and column
        means.
      sort_factored_second_moment_dims: Whether to factor the two largest dims instead of the last
        two.
      min_dim_size_to_factor: With sorted dims, weights whose second largest dim is smaller than
        this are not factored.
      multiply_by_parameter_scale: Whether to multiply the learning rate by the root mean square of
        the weight.
      epsilon1_grad_sq_reg: Constant that is added to squared gradients.
      epsilon2_param_scale_reg: Minimum scale of a weight.
      weight_decay: Factor for decoupled weight decay, which is also multiplied by the learning
        rate. A number applies to all weights. A dict maps patterns to factors; the last pattern
        that matches the start of a weight's path applies. None disables weight decay.
      layerwise_adaptation: Whether to scale the step of each weight to the root mean square of the
        weight (LAMB, https://arxiv.org/abs/1904.00962).
      exclude_from_layerwise_adaptation: Patterns for weights to exclude from this adaptation,
        matched from the start of the weights' paths.
      maybe_inf_to_nan: Whether to replace infinities with NaN, because a division would otherwise
        hide them.

    Raises:
      ConfigError: A setting is out of range, or a pattern is not a valid regular expression.
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

    def dims_to_factor(shape: tuple[int, ...]) -> tuple[int, int] | None:
        if not factored:
            return None
        return factored_dims(shape, sort_factored_second_moment_dims, min_dim_size_to_factor)

    def inf_to_nan(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isinf(x), jnp.nan, x) if maybe_inf_to_nan else x

    def settings_by_weight(params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns each weight's decay factor, and whether layer-wise adaptation applies to it."""
        decays = jax.tree.map(lambda _: 0.0, params)
        for mask, value in decayed:
            decays = jax.tree.map(
                lambda is_in, old, value=value: value if is_in else old, mask(params), decays
            )
        return decays, adapted(params)

    def init(params: PyTree) -> AdafactorState:
        settings_by_weight(params)  # For `collected_patterns`, which traces only `init`.
        slots = jax.tree.map(
            lambda w: zero_slots(
                w.shape, dims_to_factor(w.shape), quantized_dtype if beta1 else None
            ),
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
        # `steps` has a _Step per weight, which becomes a tree of updates and a tree per kind of
        # slot.
        steps = jax.tree.map(
            lambda *args: weight_step(rate, decay, *args),
            updates, params, *settings_by_weight(params), *state[1:],
        )  # fmt: skip
        updates, slots = _tree_per_field(steps, _Step)
        slots = _tree_per_field(slots, WeightSlots)
        return updates, AdafactorState(optax.safe_increment(state.count), *slots)

    def weight_step(
        rate: jax.Array, decay: jax.Array, grad: jax.Array, weight: jax.Array, weight_decay: float,
        is_adapted: bool, *slots: jax.Array,
    ) -> _Step:  # fmt: skip
        slots, weight = WeightSlots(*slots), weight.astype(jnp.float32)
        # A step is normalized, clipped, scaled, averaged, extended by weight decay, and adapted to
        # the weight, in this order.
        direction, slots = _normalized(
            inf_to_nan(grad.astype(jnp.float32)), slots, dims_to_factor(weight.shape), decay,
            epsilon1_grad_sq_reg, inf_to_nan,
        )  # fmt: skip
        if clip_threshold is not None:
            direction /= inf_to_nan(jnp.maximum(1.0, _rms(direction) / clip_threshold))
        step_size = rate
        if multiply_by_parameter_scale:
            step_size *= jnp.maximum(_rms(weight), epsilon2_param_scale_reg)
        step = step_size * direction
        if beta1:
            step = inf_to_nan(
                beta1 * dequantize_momentum(slots.m, slots.m_scale) + (1.0 - beta1) * step
            )
            m, m_scale = quantize_momentum(step, quantized_dtype)
            slots = slots._replace(m=m, m_scale=m_scale)
        if weight_decay:
            step += weight_decay * rate * weight
        if layerwise_adaptation and is_adapted:
            weight_rms = _rms(weight)
            # The ratio excludes the learning rate, which therefore still scales the adapted step.
            step_rms = _rms(step / step_size) + epsilon1_grad_sq_reg
            # If the rate is 0, step_rms is 0 / 0 = NaN, for which the comparison is also False.
            step *= jnp.where((weight_rms > 0) & (step_rms > 0), weight_rms / step_rms, 1.0)
        return _Step(-step, slots)

    return optax.GradientTransformation(init, update)


class _Step(NamedTuple):
    """The update of a weight and its new slots."""

    update: jax.Array
    slots: WeightSlots


def _normalized(
    grad: jax.Array,
    slots: WeightSlots,
    dims: tuple[int, int] | None,
    decay: jax.Array,
    epsilon: float,
    inf_to_nan: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, WeightSlots]:
    """Returns the gradient divided by the root of its second moment, and the updated slots."""

    def updated_average(old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1.0 - decay) * inf_to_nan(new)

    squared = jnp.square(grad) + epsilon
    if dims is None:
        v = updated_average(slots.v, squared)
        return grad / jnp.sqrt(v), slots._replace(v=v)
    # Factored: the second moment is approximated by the outer product of vr and vc, divided by the
    # mean of vr.
    row_dim, column_dim = dims
    vr = updated_average(slots.vr, jnp.mean(squared, row_dim))
    vc = updated_average(slots.vc, jnp.mean(squared, column_dim))
    # The dim of vr that corresponds to the weight's column_dim.
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
    """Returns the decay rate for the second moment, which is 0 in the first update."""
    number = count.astype(jnp.float32) + 1.0
    if method == "pow":
        return 1.0 - number**-decay_pow
    beta2 = jnp.float32(decay_adam)
    return beta2 * (1.0 - beta2 ** (number - 1.0)) / (1.0 - beta2**number)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _tree_per_field(tree: PyTree, kind: type[NamedTuple]) -> list[PyTree]:
    """Converts a tree of named tuples into one tree per field."""
    return [
        jax.tree.map(lambda item, i=i: item[i], tree, is_leaf=lambda x: isinstance(x, kind))
        for i in range(len(kind._fields))
    ]


def zero_slots(
    shape: Shape, dims: tuple[int, int] | None, momentum_dtype: str | None
) -> WeightSlots:
    """Returns a weight's slots before the first update.

    Args:
      shape: Shape of the weight.
      dims: The dims to average over for the row means and the column means, or None if the weight
        is not factored; see `factored_dims`.
      momentum_dtype: Dtype of the stored momentum, or None for no momentum.
    """
    # Every weight has all slots. Unused slots have a single element.
    absent = jnp.zeros((1,), jnp.float32)
    if momentum_dtype is None:
        m, m_scale = absent, absent
    else:
        m, m_scale = quantize_momentum(jnp.zeros(shape, jnp.float32), momentum_dtype)
    if dims is None:
        return WeightSlots(m, m_scale, absent, absent, jnp.zeros(shape, jnp.float32))
    vr, vc = (jnp.zeros(shape[:dim] + shape[dim + 1 :], jnp.float32) for dim in dims)
    return WeightSlots(m, m_scale, vr, vc, absent)


def factored_dims(shape: Shape, by_size: bool, min_size: int) -> tuple[int, int] | None:
    """Returns the dims to average over for the row and column means, or None if not factored.

    Args:
      shape: Shape of the weight.
      by_size: Whether to factor the largest and second-largest dims instead of the last two dims.
        Among dims of equal size, the last one is treated as the largest, as in optax; `slots.py`
        relies on this. Pax treats the first one as the largest, so `vr` and `vc` are swapped for
        such weights.
      min_size: Minimum size of both dims if `by_size` is set.
    """
    if len(shape) < 2:
        return None
    if not by_size:
        return len(shape) - 1, len(shape) - 2
    *_, second, largest = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    return (largest, second) if shape[second] >= min_size else None


def quantize_momentum(m: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Converts a float32 momentum to its storage format (m, m_scale).

    The integer range is symmetric around 0, and the largest magnitude in each column is mapped to
    the end of the range. A scalar has no columns and stays float32.
    """
    if dtype in ("bfloat16", "float32"):
        return m.astype(dtype), jnp.zeros((1,), jnp.float32)
    if not m.ndim:
        return m, jnp.zeros((1,), jnp.float32)
    scale = jnp.max(jnp.abs(m), axis=0) / jnp.iinfo(dtype).max
    # A column of zeros has a scale of 0.
    rounded = jnp.round(m / jnp.where(scale > 0, scale, 1.0)[None])
    return rounded.astype(dtype), scale


def dequantize_momentum(m: jax.Array, m_scale: jax.Array) -> jax.Array:
    """Returns the float32 momentum; the inverse of `quantize_momentum`."""
    if jnp.issubdtype(m.dtype, jnp.integer):
        return m.astype(jnp.float32) * m_scale[None]
    return m.astype(jnp.float32)
