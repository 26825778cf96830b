"""Does a mesh compute what one device does? For `--mode=check`, and for tests of one's own.

Runs a job's steps, in float64 and as they are trained. Never sees a job's directory.
"""

from praxis_lite.testing.certificate import Certificate
from praxis_lite.testing.check_on_meshes import check_on_meshes

__all__ = ["Certificate", "check_on_meshes"]
