"""A scanned stack trains as an unrolled one, by every optimizer that looks at a whole tensor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.core import Learner, WeightSpec
from praxis_lite.optimizers import adafactor, muon_matrices, soap

NUM_LAYERS, NUM_STEPS, F32 = 3, 5, jnp.dtype("float32")
LAYER_SPECS = {"b": WeightSpec((7,), F32), "w": WeightSpec((5, 7), F32)}


def is_spec(x):
    return isinstance(x, WeightSpec)


# The same three layers twice: as a stack, and each by itself.
SPECS = {
    "scanned": jax.tree.map(
        lambda spec: WeightSpec((NUM_LAYERS, *spec.shape), F32, None, (None,)),
        LAYER_SPECS,
        is_leaf=is_spec,
    ),
    **{f"layer_{i}": LAYER_SPECS for i in range(NUM_LAYERS)},
}

# Those of single elements, of which a stack has no more, are left out.
OPTIMIZERS = {
    "lamb": functools.partial(optax.lamb, weight_decay=0.1),
    "adafactor (optax)": functools.partial(optax.adafactor, min_dim_size_to_factor=2, momentum=0.9),
    "adafactor": functools.partial(
        adafactor,
        decay_method="pow",
        decay_pow=0.8,
        beta1=0.9,
        min_dim_size_to_factor=2,
        multiply_by_parameter_scale=True,
        layerwise_adaptation=True,
    ),
    "muon": functools.partial(
        optax.contrib.muon, consistent_rms=0.2, muon_weight_dimension_numbers=muon_matrices()
    ),
    "soap": functools.partial(soap, precondition_frequency=2, max_precond_dim=5),
    "schedule-free": functools.partial(optax.contrib.schedule_free_adamw, weight_decay=0.1),
}


def layers(seed):
    """Returns values of both forms: layers as different in scale as 1, 10 and 100."""
    rng = np.random.default_rng(seed)
    scanned = jax.tree.map(
        lambda spec: np.stack(
            [10**i * rng.normal(size=spec.shape) for i in range(NUM_LAYERS)]
        ).astype(np.float32),
        LAYER_SPECS,
        is_leaf=is_spec,
    )
    return {
        "scanned": scanned,
        **{f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], scanned) for i in range(NUM_LAYERS)},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scanned_stack_trains_as_an_unrolled_one(name):
    learner = Learner(OPTIMIZERS[name], lambda count: 0.1 / (1.0 + count))
    bound = learner.bind(SPECS)

    @jax.jit
    def trained(params, grads):
        def step(carry, grad):
            params, opt_states = carry
            new = bound.update(grad, opt_states, params, jnp.float32(1))
            return new[:2], None

        start = (params, bound.init(params))
        params, opt_states = jax.lax.scan(step, start, grads)[0]
        return params, bound.eval_params(params, opt_states, use_ema=False)

    def assert_close(result, expected, start):
        # A weight of 100 that is now 0.1 has the rounding errors of 100.
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6 * np.abs(start).max())

    grads = jax.tree.map(lambda *g: jnp.stack(g), *(layers(10 + i) for i in range(NUM_STEPS)))
    for actual in trained(layers(0), grads):
        for i in range(NUM_LAYERS):
            layer = jax.tree.map(lambda x, i=i: x[i], actual["scanned"])
            start = layers(0)[f"layer_{i}"]
            jax.tree.map(assert_close, layer, actual[f"layer_{i}"], start)
            for before, after in zip(
                jax.tree.leaves(start), jax.tree.leaves(actual[f"layer_{i}"]), strict=True
            ):
                assert np.abs(after - before).max() > 1e-3
