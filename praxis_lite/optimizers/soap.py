"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam"
(https://arxiv.org/abs/2409.11321), algorithms 3 and 4. Defaults are taken from the authors' code.

The slots of a weight [d0, .., dk] are float32. Two slots have the shape of the weight, as in Adam.
For each dim of size d up to `max_precond_dim`, there are two more slots [d, d]: the covariance of
the gradient along this dim, and its eigenbasis. A weight [D, F] thus needs 2 (D D + F F) more
floats than with Adam. Use an auxiliary optimizer for embeddings with a small vocabulary, because
rotation also changes the rows of tokens that have not occurred yet.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import is_positive_int, require
from praxis_lite.optimizers.optimizer_settings import require_decay_rates, require_not_negative

PyTree = Any
# Bases would not stay orthogonal if accelerators rounded the operands to bfloat16.
_tensordot = functools.partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)
# Fraction of the largest eigenvalue that exceeds float32 rounding errors, even for large dims.
_NEGLIGIBLE = 1e-5


class SoapState(NamedTuple):
    """Slots of `scale_by_soap`.

    Attributes:
      count: Int32 number of updates, including the first one, which only collects statistics.
      mu: First moments of gradients, with the shapes of the weights.
      nu: Second moments of rotated gradients, with the shapes of the weights.
      covariances: A tuple per weight, which contains an array [d, d] per dim, or [1, 1] for dims
        that are not rotated.
      bases: Eigenvectors of the covariances as columns, in descending order of eigenvalues, with
        the same structure as `covariances`.
    """

    count: jax.Array  # type: ignore[assignment]  # Hides tuple.count, as in optax.
    mu: PyTree
    nu: PyTree
    covariances: PyTree
    bases: PyTree


def soap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    weight_decay_mask: Any = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10_000,
) -> optax.GradientTransformation:
    """Returns SOAP with decoupled weight decay, multiplied by the learning rate as in AdamW.

    Args:
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      b1: See `scale_by_soap`.
      b2: See `scale_by_soap`.
      eps: See `scale_by_soap`.
      weight_decay: Decay factor: each weight, times this factor, is added to its direction.
      weight_decay_mask: See `optax.adamw`.
      precondition_frequency: See `scale_by_soap`.
      max_precond_dim: See `scale_by_soap`.
    """
    return optax.chain(
        scale_by_soap(
            b1=b1,
            b2=b2,
            eps=eps,
            precondition_frequency=precondition_frequency,
            max_precond_dim=max_precond_dim,
        ),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_soap(
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10_000,
) -> optax.GradientTransformation:
    """Returns the transformation from gradients to SOAP's directions.

    Each dim of a weight has a basis, so an attention weight [D, H, K] has three. Weights with fewer
    than two dims are updated as in Adam. As in the authors' code, the first update is zero: it
    computes the first bases by an eigendecomposition, so that no gradient is rotated by a basis
    that was computed from the same gradient. Before each QR decomposition, columns and second
    moments are sorted by eigenvalue.

    Args:
      b1: Decay of the first moment, which is not rotated.
      b2: Decay of the second moment and of the covariances.
      eps: Constant that is added to the square root of the second moment.
      precondition_frequency: Number of updates between refreshes of the bases. Every device repeats
        each refresh, which consists of a power iteration step and a QR decomposition per dim.
      max_precond_dim: Largest dim to rotate. The time for a refresh is cubic in this dim.

    Raises:
      ConfigError: A decay is outside [0, 1), or the frequency or the largest dim is below 1.
    """
    require_decay_rates("soap", b1=b1, b2=b2)
    require_not_negative("soap", eps=eps)
    counts = {"precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim}
    for name, count in counts.items():
        require(is_positive_int(count), f"soap: {name}", count, "a positive integer")

    def zero_squares(w: jax.Array) -> tuple[jax.Array, ...]:
        # Create an entry for every dim, so that the structure of the slots depends only on ranks.
        sizes = [d if d <= max_precond_dim else 1 for d in w.shape] if w.ndim > 1 else []
        return tuple(jnp.zeros((d, d), jnp.float32) for d in sizes)

    def init(params: PyTree) -> SoapState:
        def zero_moments() -> PyTree:
            return optax.tree.zeros_like(params, dtype=jnp.float32)

        return SoapState(
            jnp.zeros((), jnp.int32),
            zero_moments(),
            zero_moments(),
            jax.tree.map(zero_squares, params),
            jax.tree.map(zero_squares, params),
        )

    def update(
        updates: PyTree, state: SoapState, params: PyTree | None = None
    ) -> tuple[PyTree, SoapState]:
        del params
        leaves = jax.tree.leaves(updates)
        treedef: Any = jax.tree.structure(updates)  # JAX's stubs lack its methods.
        mu, nu, covariances, bases = (treedef.flatten_up_to(slots) for slots in state[1:])
        grads = [g.astype(jnp.float32) for g in leaves]
        is_first = state.count == 0
        # The first update does not count, because its moments are set to 0 below.
        num_updates = jnp.maximum(state.count, 1).astype(jnp.float32)

        def direction(m: jax.Array, v: jax.Array, basis: tuple[jax.Array, ...]) -> jax.Array:
            m, v = _rotate(m, basis) / (1.0 - b1**num_updates), v / (1.0 - b2**num_updates)
            return _rotate(_without_rounding(m, v, basis) / (jnp.sqrt(v) + eps), basis, back=True)

        # The second moment is stored in the rotated basis. The first moment is stored unrotated,
        # and rotated when it is used.
        mu = [b1 * m + (1.0 - b1) * g for m, g in zip(mu, grads, strict=True)]
        nu = [
            b2 * v + (1.0 - b2) * jnp.square(_rotate(g, basis))
            for v, g, basis in zip(nu, grads, bases, strict=True)
        ]
        directions = list(map(direction, mu, nu, bases))
        mu, nu, directions = jax.tree.map(lambda x: jnp.where(is_first, 0, x), (mu, nu, directions))
        # Dims that are not rotated have a placeholder instead of a covariance.
        covariances = [
            tuple(
                b2 * c + (1.0 - b2) * _covariance(g, dim) if _is_basis(c) else c
                for dim, c in enumerate(per_dim)
            )
            for g, per_dim in zip(grads, covariances, strict=True)
        ]
        # The bases are refreshed last: they affect only later updates.
        slots = _apply_if(is_first, _first_bases, (nu, covariances, bases))
        is_due = ~is_first & (state.count % precondition_frequency == 0)
        nu, covariances, bases = _apply_if(is_due, _next_bases, slots)
        directions = [d.astype(g.dtype) for d, g in zip(directions, leaves, strict=True)]
        slots = map(treedef.unflatten, (mu, nu, covariances, bases))
        return treedef.unflatten(directions), SoapState(state.count + 1, *slots)

    return optax.GradientTransformation(init, update)


def _is_basis(square: jax.Array) -> bool:
    """Returns whether a dim is rotated; the array of a dim that is not rotated is [1, 1]."""
    return square.shape[0] > 1


def _rotate(x: jax.Array, bases: tuple[jax.Array, ...], back: bool = False) -> jax.Array:
    """Rotates `x` into the bases of its dims, or back."""
    for dim, basis in enumerate(bases):
        if _is_basis(basis):
            x = jnp.moveaxis(_tensordot(x, basis, axes=((dim,), (int(back),))), -1, dim)
    return x


def _without_rounding(m: jax.Array, v: jax.Array, bases: tuple[jax.Array, ...]) -> jax.Array:
    """Zeros rotated `m` along eigenvectors whose gradients are only rounding errors.

    Otherwise the division by the square root of `v` would amplify rounding errors, so that weights
    without gradients, such as embeddings of unused tokens, would change as much as other weights.
    """
    for dim, basis in enumerate(bases):
        if _is_basis(basis):
            others = tuple(d for d in range(v.ndim) if d != dim)
            eigenvalues = jnp.sum(v, axis=others, keepdims=True)
            m = jnp.where(eigenvalues > _NEGLIGIBLE**2 * jnp.max(eigenvalues), m, 0)
    return m


def _covariance(g: jax.Array, dim: int) -> jax.Array:
    """Returns the covariance g g^T along `dim`, summed over all other dims."""
    others = tuple(d for d in range(g.ndim) if d != dim)
    return _tensordot(g, g, axes=(others, others))


def _first_bases(slots: tuple[list, list, list]) -> tuple[list, list, list]:
    nu, covariances, bases = slots
    return (
        nu,
        covariances,
        jax.tree.map(
            lambda c, zeros: _eigenbasis(c) if _is_basis(c) else zeros, covariances, bases
        ),
    )


def _eigenbasis(covariance: jax.Array) -> jax.Array:
    """Returns eigenvectors as columns, in descending order of eigenvalues."""
    eigenvalues, vectors = (x[..., ::-1] for x in jnp.linalg.eigh(covariance))
    # A gradient [D, F] is zero along F - D directions. Their basis from `eigh` depends on rounding
    # errors, so weights would depend on the mesh. Replace it with a reproducible basis.
    is_null = eigenvalues <= _NEGLIGIBLE * eigenvalues[0]
    null = jnp.where(is_null[None], vectors, 0)
    random = jax.random.normal(jax.random.key(0, impl="threefry2x32"), covariance.shape)
    inside = _tensordot(null, _tensordot(null.T, random, axes=1), axes=1)
    return jnp.linalg.qr(jnp.where(is_null[None], inside, vectors))[0]


def _next_bases(slots: tuple[list, list, list]) -> tuple[list, list, list]:
    nu, covariances, bases = map(list, slots)
    for i, per_dim in enumerate(covariances):
        for dim, covariance in enumerate(per_dim):
            if not _is_basis(covariance):
                continue
            basis = bases[i][dim]
            # A step of power iteration. The projection onto the basis estimates the eigenvalues.
            power = _tensordot(covariance, basis, axes=1)
            eigenvalues = jnp.sum(basis * power, axis=0)
            # Keep directions without gradients, which QR would replace with arbitrary directions.
            power += _NEGLIGIBLE * jnp.max(eigenvalues) * basis
            order = jnp.argsort(-eigenvalues)
            nu[i] = jnp.take(nu[i], order, axis=dim)
            basis = jnp.linalg.qr(power[:, order])[0]
            bases[i] = (*bases[i][:dim], basis, *bases[i][dim + 1 :])
    return nu, covariances, bases


def _apply_if(is_due: jax.Array, fn: Callable[[PyTree], PyTree], slots: PyTree) -> PyTree:
    """Returns `fn(slots)` if `is_due`, otherwise `slots`, and computes only the selected branch.

    `jax.vmap` over the layers of a stack would convert a `lax.cond` to a select that computes both
    branches, so the matrices of all layers would be decomposed in every step. This function has a
    custom batching rule that also uses a `cond`: it applies `fn` if any layer is due. All layers
    are due at the same time.
    """

    @jax.custom_batching.custom_vmap
    def apply_if(is_due: jax.Array, slots: PyTree) -> PyTree:
        return jax.lax.cond(is_due, fn, lambda slots: slots, slots)

    @apply_if.def_vmap
    def _(axis_size: int, is_mapped: PyTree, *args: PyTree) -> tuple[PyTree, PyTree]:
        def apply_to_stack(args: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            def apply_to_layer(is_due: jax.Array, slots: PyTree) -> PyTree:
                return jax.tree.map(functools.partial(jnp.where, is_due), fn(slots), slots)

            return args[0], jax.vmap(apply_to_layer)(*args)

        # Give every argument the dim of the stack, which unbatched arguments lack.
        args = jax.tree.map(
            lambda x, mapped: x if mapped else jnp.broadcast_to(x, (axis_size, *x.shape)),
            args,
            tuple(is_mapped),
        )
        # The inner call supports a further vmap, over a stack of stacks.
        slots = _apply_if(jnp.any(args[0]), apply_to_stack, args)[1]
        return slots, jax.tree.map(lambda _: True, slots)

    return apply_if(is_due, slots)
