"""WHAT is run: experiments, their reports of a run, and the names they are found by.

Holds configs, and never sees an array. Public names are those of `praxis_lite` itself.
"""
