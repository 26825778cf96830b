"""Whether the CPU that runs the tests can compute in float16.

XLA's CPU compiler has no routine of its own that converts halves (jax 0.10 to 0.12: "Symbols not
found: [ __extendhfsf2, __truncsfhf2 ]"); it needs the F16C instructions, which x86 has had since
2012, or an ARM processor. float8 converts through halves.
"""

import jax
import jax.numpy as jnp
import pytest


def _cpu_has_float16() -> bool:
    try:
        return float(jax.jit(lambda x: jnp.log(x.astype(jnp.float16)))(1.0)) == 0.0
    except jax.errors.JaxRuntimeError:
        return False


HAS_FLOAT16 = _cpu_has_float16()
# For tests that only pass through it.
HALF = jnp.float16 if HAS_FLOAT16 else jnp.bfloat16
needs_float16 = pytest.mark.skipif(not HAS_FLOAT16, reason="this CPU converts no float16")
