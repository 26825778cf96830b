"""How do other programs use a trained model? Over HTTP, or as files that need no part of this.

    python -m praxis_lite.interop.export JOB OUT --what=decode|predict
    python -m praxis_lite.main --mode=serve --job_log_dir=JOB

Never sees how a model is trained: it takes weights, and a compiled step's function.
"""
