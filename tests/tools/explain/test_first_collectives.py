"""The collectives that wait for a process, read from a program whose layout is known."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from praxis_tools.explain.first_collectives import first_collectives


def test_the_first_collective_that_leaves_a_process_is_found_by_its_devices():
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(4, 2), ("data", "mdl"), axis_types=(AxisType.Auto,) * 2
    )

    def step(x_BD, w_DF):
        with jax.named_scope("first"):
            y_BF = jax.lax.with_sharding_constraint(
                x_BD @ w_DF, NamedSharding(mesh, PartitionSpec("data", None))
            )
        with jax.named_scope("second"):
            return jnp.sum(jnp.tanh(y_BF), axis=0)

    def split(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    compiled = (
        jax.jit(
            step, in_shardings=(split("data", "mdl"), split("mdl", None)), out_shardings=split()
        )
        .lower(jnp.ones((28, 6)), jnp.ones((6, 37)))
        .compile()
    )
    # "first" sums over mdl, then "second" over data: by hand, 7 x 37 and 37 floats of 4 bytes.
    sizes = dict(mesh.shape)
    rows_apart = first_collectives(compiled, sizes, [0, 0, 1, 1, 2, 2, 3, 3])
    assert rows_apart == dict.fromkeys(range(4), "all-reduce of 148 B over data, in layer second")
    columns_apart = first_collectives(compiled, sizes, [0, 1, 0, 1, 0, 1, 0, 1])
    assert columns_apart == dict.fromkeys(
        range(2), "all-reduce of 1.0 KiB over mdl, in layer first"
    )
    assert first_collectives(compiled, sizes, [0] * 8) == {}
