"""Which devices are there, in what order and axes, and what do their compilers get wrong?

Never sees a layer.
"""
