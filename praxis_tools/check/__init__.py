"""Does a mesh compute the same as a single device? For `--mode=check`, and for your own tests.

Runs a job's steps, in float64 and as they are trained. Never sees a job's directory.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
