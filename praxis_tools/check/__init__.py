"""Checks that a job computes the same on a mesh as on a single device.

Used by `--mode=check` and by tests of your models. It runs the steps of a job both in float64 and
in the job's own types, and never touches a job's directory.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
