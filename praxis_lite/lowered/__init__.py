"""Programs that are lowered and not compiled yet: what XLA would compute wrong in them, mended.

It never sees tasks, layers or jobs.
"""
