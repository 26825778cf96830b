"""Which devices are there, in what order, and what do their compilers get wrong?

Never sees a layer.
"""
