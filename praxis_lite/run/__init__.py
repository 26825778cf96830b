"""WHAT is run and WHEN: experiments, their configs, jobs, checkpoints and the loops.

Never imports `praxis_lite.tools`.
"""
