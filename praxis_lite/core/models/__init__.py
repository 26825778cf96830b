"""Models: init and apply over nested dicts of arrays; a module of NNX as such a pair.

Never sees a device, a task or what the model computes.
"""
