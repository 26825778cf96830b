"""A job's computation as files that other programs run: they need no part of this library.

    python -m praxis_lite.interop.export JOB OUT --what=decode|predict

Never sees how a model is trained: it takes weights, and a compiled step's function.
"""
