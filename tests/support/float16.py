"""Determines whether the CPU that runs the tests can compute in float16.

XLA's CPU compiler has no routine to convert float16 (jax 0.10 to 0.12: "Symbols not found:
[ __extendhfsf2, __truncsfhf2 ]"). It requires an ARM processor or the F16C instructions, which x86
processors have had since 2012. float8 is converted via float16.
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
# For tests that use float16 only indirectly.
HALF = jnp.float16 if HAS_FLOAT16 else jnp.bfloat16
needs_float16 = pytest.mark.skipif(not HAS_FLOAT16, reason="this CPU cannot convert float16")
