"""Compares the temporary memory of a large-vocabulary softmax with and without chunks.

`python benchmarks/softmax_memory.py` compiles the loss and its gradients for one device, and reads
the temporary memory from the executable (`memory_analysis`). For T tokens, D input dims, V classes
and chunks of C classes in float32, the expected memory is:

    chunked, at most   4 (2 C D + 4 C T + 16 T D) bytes
    no chunks, at least   4 T V bytes

The chunked terms are the weight and its gradient for one chunk; the logits, their exponentials and
gradients for one chunk; and the values stored per token. Only the gradient of the weight grows with
V, and it is a result, not temporary memory.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from praxis_lite import layers
from praxis_lite.core import NnxModel

NUM_CLASSES, INPUT_DIMS = 1_000_003, 64
TOKENS, CHUNK_SIZES = (16, 256), (1024, 4096)


def allowed_bytes(tokens: int, input_dims: int, chunk_size: int) -> int:
    """Returns the expected temporary bytes of the chunked softmax."""
    elements = 2 * chunk_size * input_dims + 4 * chunk_size * tokens + 16 * tokens * input_dims
    return 4 * elements


def temporary_bytes(num_classes: int, input_dims: int, tokens: int, chunk_size: int | None) -> int:
    """Returns the temporary bytes of a softmax's loss and gradients."""
    model = NnxModel(
        functools.partial(layers.FullSoftmax, num_classes, input_dims, chunk_size=chunk_size)
    )

    def total_xent(params, inputs, class_ids, class_weights):
        module = model.module({"params": params, "non_trainable": {}})
        return module.compute_loss(inputs, class_ids, class_weights)["total_xent"]

    lowered = jax.jit(jax.value_and_grad(total_xent, argnums=(0, 1))).lower(
        jax.eval_shape(model.init, jax.random.key(0))["params"],
        jax.ShapeDtypeStruct((tokens, input_dims), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_classes", type=int, default=NUM_CLASSES)
    num_classes = parser.parse_args().num_classes
    print(f"{num_classes:,} classes, {INPUT_DIMS} input dims; bytes")
    print(f"{'tokens':>7}{'chunk':>8}{'measured':>15}{'formula':>15}{'ratio':>8}")
    for tokens in TOKENS:
        measured = temporary_bytes(num_classes, INPUT_DIMS, tokens, None)
        formula = 4 * tokens * num_classes
        print(f"{tokens:>7}{'none':>8}{measured:>15,}{formula:>15,}{measured / formula:>8.2f}")
        for chunk_size in CHUNK_SIZES:
            measured = temporary_bytes(num_classes, INPUT_DIMS, tokens, chunk_size)
            formula = allowed_bytes(tokens, INPUT_DIMS, chunk_size)
            print(
                f"{tokens:>7}{chunk_size:>8}{measured:>15,}{formula:>15,}{measured / formula:>8.2f}"
            )


if __name__ == "__main__":
    main()
