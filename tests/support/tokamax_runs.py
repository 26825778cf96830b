"""Prints what a plan counts for tokamax kernels compiled for a TPU, as JSON."""

import json

import jax
import jax.numpy as jnp

from praxis_lite.core import MeshConfig, make_mesh
from praxis_lite.layers.attention.kernels.choice import attend
from praxis_lite.layers.attention.kernels.settings import AttentionSettings
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.moe.grouped_matmul import grouped_matmul
from praxis_tools.explain.hlo_text import parse
from praxis_tools.explain.kernels import is_kernel, kernel_flops, tiles_of_experts
from praxis_tools.plan.topology import topology_of

B, T, N, G, K = 1, 3072, 4, 2, 128  # Rows, tokens, query heads, key heads, dims per head.
ROWS, EXPERTS, INPUTS, OUTPUTS = 1024, 4, 1408, 256


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = AttentionMask(None, 0)
    return jnp.sum(attend(AttentionSettings("tokamax"), q, k, v, mask).astype(jnp.float32) ** 2)


def experts(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    y = grouped_matmul("tokamax", x, w, rows, ROWS / 2)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def kernels(function: object, num_grads: int, *args: jax.ShapeDtypeStruct) -> dict[str, list]:
    """Returns [flops, model flops, tile sizes] of each kernel in a gradient, by its name."""
    devices = topology_of("v5e:2x2", 1).devices[:1]
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1,), axis_names=("data",)), devices)
    with jax.set_mesh(mesh):
        gradient = jax.grad(function, argnums=tuple(range(num_grads)))
        program = parse(jax.jit(gradient).lower(*args).compile().as_text())
    return {
        one.name.rpartition(".")[0]: [
            kernel_flops(one, around),
            kernel_flops(one, around, of_model=True),
            tiles_of_experts(one, around),
        ]
        for around in program.computations.values()
        for one in around.values()
        if is_kernel(one)
    }


def array(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


if __name__ == "__main__":
    print(
        json.dumps(
            [
                kernels(attention, 3, array(B, T, N, K), array(B, T, G, K), array(B, T, G, K)),
                kernels(
                    experts,
                    2,
                    array(ROWS, INPUTS),
                    array(EXPERTS, INPUTS, OUTPUTS),
                    array(EXPERTS, dtype=jnp.int32),
                ),
            ]
        )
    )
