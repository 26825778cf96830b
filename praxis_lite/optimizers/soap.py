"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

From Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam"
(https://arxiv.org/abs/2409.11321), algorithms 3 and 4; defaults are those of the authors' code.

Slots of a weight [d0, .., dk], in float32: two of its shape, as Adam's, and for each dim of at most
`max_precond_dim` the covariance of the gradient along it and its eigenbasis, both [d, d]. For a
[D, F] weight that is 2 (D D + F F) floats more than Adam. Give embeddings of a small vocabulary to
an auxiliary optimizer: rotation moves rows that no token has used along with others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import is_whole, require
from praxis_lite.optimizers.optimizer_settings import require_decay_rates, require_not_negative

PyTree = Any
# On accelerators that round the operands of a product to bfloat16, a basis would not be orthogonal.
_tensordot = functools.partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)
# Of the largest eigenvalue; above the rounding of float32 for dims of thousands.
_NEGLIGIBLE = 1e-5


class SoapState(NamedTuple):
    """Slots of `scale_by_soap`.

    Attributes:
      count: int32, updates made, the first included, which only measures.
      mu: first moment of the gradient, of the weight's shape.
      nu: second moment of the rotated gradient, of the weight's shape.
      covariances: per weight a tuple, per dim [d, d]; [1, 1] for a dim that is not rotated.
      bases: the same, eigenvectors in columns, the largest eigenvalue first.
    """

    count: jax.Array
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
    """Returns SOAP with decoupled weight decay, which the learning rate multiplies as in AdamW.

    Args:
      weight_decay_mask: as of `optax.adamw`.
      b1, b2, eps, precondition_frequency, max_precond_dim: as of `scale_by_soap`.
    """
    return optax.chain(
        scale_by_soap(
            b1=b1, b2=b2, eps=eps, precondition_frequency=precondition_frequency,
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
    """Returns the transformation of gradients into SOAP's directions.

    Args:
      b1: decay of the first moment, which is kept unrotated.
      b2: decay of the second moment and of the covariances.
      precondition_frequency: updates from one refresh of the bases to the next. A refresh is a step
        of power iteration and a QR decomposition per dim, which every device computes whole.
      max_precond_dim: the largest dim that is rotated; a refresh's time grows with its cube.

    A weight of more than two dims has a basis for each ([D, N, K] of an attention: three), one of
    fewer gets Adam. As in the authors' code the first update is zero: it sets the first bases, by
    an eigendecomposition, so that no gradient is rotated by a basis made of itself; and before a QR
    the columns are sorted by their eigenvalues, the second moment with them.

    Raises:
      ConfigError: a decay outside [0, 1), a frequency or a largest dim below 1.
    """
    require_decay_rates("soap", b1=b1, b2=b2)
    require_not_negative("soap", eps=eps)
    counts = {"precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim}
    for name, count in counts.items():
        require(is_whole(count), f"soap: {name}", count, "a positive integer")

    def squares(w: jax.Array) -> tuple[jax.Array, ...]:
        # One entry per dim whatever the sizes: the tree of slots depends on ranks alone.
        sizes = [d if d <= max_precond_dim else 1 for d in w.shape] if w.ndim > 1 else []
        return tuple(jnp.zeros((d, d), jnp.float32) for d in sizes)

    def init(params: PyTree) -> SoapState:
        def moments() -> PyTree:
            return optax.tree.zeros_like(params, dtype=jnp.float32)

        return SoapState(
            jnp.zeros((), jnp.int32), moments(), moments(),
            jax.tree.map(squares, params), jax.tree.map(squares, params),
        )

    def update(
        updates: PyTree, state: SoapState, params: PyTree | None = None
    ) -> tuple[PyTree, SoapState]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        mu, nu, covariances, bases = (treedef.flatten_up_to(slots) for slots in state[1:])
        grads = [g.astype(jnp.float32) for g in leaves]
        is_first = state.count == 0
        num_updates = jnp.maximum(state.count, 1).astype(jnp.float32)

        def direction(m: jax.Array, v: jax.Array, basis: tuple[jax.Array, ...]) -> jax.Array:
            m, v = _rotated(m, basis) / (1.0 - b1**num_updates), v / (1.0 - b2**num_updates)
            return _rotated(_cleared(m, v, basis) / (jnp.sqrt(v) + eps), basis, back=True)

        mu = [b1 * m + (1.0 - b1) * g for m, g in zip(mu, grads, strict=True)]
        nu = [
            b2 * v + (1.0 - b2) * jnp.square(_rotated(g, basis))
            for v, g, basis in zip(nu, grads, bases, strict=True)
        ]
        directions = list(map(direction, mu, nu, bases))
        mu, nu, directions = jax.tree.map(lambda x: jnp.where(is_first, 0, x), (mu, nu, directions))
        covariances = [
            tuple(
                b2 * c + (1.0 - b2) * _covariance(g, dim) if _is_basis(c) else c
                for dim, c in enumerate(along)
            )
            for g, along in zip(grads, covariances, strict=True)
        ]
        slots = _where_due(is_first, _first_bases, (nu, covariances, bases))
        is_due = ~is_first & (state.count % precondition_frequency == 0)
        nu, covariances, bases = _where_due(is_due, _next_bases, slots)
        directions = [d.astype(g.dtype) for d, g in zip(directions, leaves, strict=True)]
        slots = map(treedef.unflatten, (mu, nu, covariances, bases))
        return treedef.unflatten(directions), SoapState(state.count + 1, *slots)

    return optax.GradientTransformation(init, update)


def _is_basis(square: jax.Array) -> bool:
    """Returns True if a dim is rotated; [1, 1] stands for no rotation."""
    return square.shape[0] > 1


def _rotated(x: jax.Array, bases: tuple[jax.Array, ...], back: bool = False) -> jax.Array:
    """Returns `x` in the coordinates of the bases of its dims, or back from them."""
    for dim, basis in enumerate(bases):
        if _is_basis(basis):
            x = jnp.moveaxis(_tensordot(x, basis, axes=((dim,), (int(back),))), -1, dim)
    return x


def _cleared(m: jax.Array, v: jax.Array, bases: tuple[jax.Array, ...]) -> jax.Array:
    """Returns rotated `m` with zeros along eigenvectors that have had no gradient but rounding.

    Divided by the root of its square, rounding would move a weight that has no gradient, such as
    the row of an embedding that no token has used, as far as any other.
    """
    for dim, basis in enumerate(bases):
        if _is_basis(basis):
            others = tuple(d for d in range(v.ndim) if d != dim)
            eigenvalues = jnp.sum(v, axis=others, keepdims=True)
            m = jnp.where(eigenvalues > _NEGLIGIBLE**2 * jnp.max(eigenvalues), m, 0)
    return m


def _covariance(g: jax.Array, dim: int) -> jax.Array:
    """Returns g g^T with all dims but the named dim summed over."""
    others = tuple(d for d in range(g.ndim) if d != dim)
    return _tensordot(g, g, axes=(others, others))


def _first_bases(slots: tuple[list, list, list]) -> tuple[list, list, list]:
    nu, covariances, bases = slots
    return nu, covariances, jax.tree.map(
        lambda c, zeros: _eigenbasis(c) if _is_basis(c) else zeros, covariances, bases
    )


def _eigenbasis(covariance: jax.Array) -> jax.Array:
    """Returns eigenvectors in columns, the largest eigenvalue first."""
    eigenvalues, vectors = (x[..., ::-1] for x in jnp.linalg.eigh(covariance))
    # A [D, F] gradient has no part along F - D directions, of which `eigh` returns what rounding
    # makes of them: other bases, and so other weights, on each mesh. These are the same everywhere.
    is_null = eigenvalues <= _NEGLIGIBLE * eigenvalues[0]
    null = jnp.where(is_null[None], vectors, 0)
    anything = jax.random.normal(jax.random.key(0, impl="threefry2x32"), covariance.shape)
    inside = _tensordot(null, _tensordot(null.T, anything, axes=1), axes=1)
    return jnp.linalg.qr(jnp.where(is_null[None], inside, vectors))[0]


def _next_bases(slots: tuple[list, list, list]) -> tuple[list, list, list]:
    nu, covariances, bases = map(list, slots)
    for i, along in enumerate(covariances):
        for dim, covariance in enumerate(along):
            if not _is_basis(covariance):
                continue
            basis = bases[i][dim]
            power = _tensordot(covariance, basis, axes=1)
            eigenvalues = jnp.sum(basis * power, axis=0)
            # So that a direction without a gradient stays, where QR would make up another.
            power += _NEGLIGIBLE * jnp.max(eigenvalues) * basis
            order = jnp.argsort(-eigenvalues)
            nu[i] = jnp.take(nu[i], order, axis=dim)
            basis = jnp.linalg.qr(power[:, order])[0]
            bases[i] = (*bases[i][:dim], basis, *bases[i][dim + 1 :])
    return nu, covariances, bases


def _where_due(is_due: jax.Array, fn: Callable[[PyTree], PyTree], slots: PyTree) -> PyTree:
    """Returns `fn(slots)` if `is_due`, else `slots`, computing only the result.

    A stack's layers are mapped over by `jax.vmap`, which turns a `lax.cond` into both branches and
    a select: every step would decompose every layer's matrices. Here the mapped rule is a `cond` as
    well, taken if any layer is due; all are due together.
    """

    @jax.custom_batching.custom_vmap
    def where_due(is_due: jax.Array, slots: PyTree) -> PyTree:
        return jax.lax.cond(is_due, fn, lambda slots: slots, slots)

    @where_due.def_vmap
    def _(axis_size: int, is_mapped: PyTree, *args: PyTree) -> tuple[PyTree, PyTree]:
        def of_stack(args: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            def of_layer(is_due: jax.Array, slots: PyTree) -> PyTree:
                return jax.tree.map(functools.partial(jnp.where, is_due), fn(slots), slots)

            return args[0], jax.vmap(of_layer)(*args)

        args = jax.tree.map(
            lambda x, mapped: x if mapped else jnp.broadcast_to(x, (axis_size, *x.shape)),
            args, tuple(is_mapped),
        )
        slots = _where_due(jnp.any(args[0]), of_stack, args)[1]
        return slots, jax.tree.map(lambda _: True, slots)

    return where_due(is_due, slots)
