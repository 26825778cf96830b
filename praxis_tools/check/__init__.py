"""Checks that a job computes the same results on a mesh as on a single device.

It is used by `--mode=check` and in tests of your models. It runs a job's steps both in float64 and
in the job's own types, and never accesses the job directory.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
