"""Does a mesh compute the same as a single device? For `--mode=check`, and for your own tests.

Runs a job's steps, in float64 and as they are trained. Never sees a job's directory.
"""

from praxis_lite.testing.asserts.collectives import (
    CompiledStep,
    assert_collectives,
    compiled_step,
)
from praxis_lite.testing.asserts.layers import assert_near, drawn, revealing, run_layers
from praxis_lite.testing.certificate import Certificate
from praxis_lite.testing.check_on_meshes import check_on_meshes

__all__ = [
    "Certificate",
    "CompiledStep",
    "assert_collectives",
    "assert_near",
    "check_on_meshes",
    "compiled_step",
    "drawn",
    "revealing",
    "run_layers",
]
