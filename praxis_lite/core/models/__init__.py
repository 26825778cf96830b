"""What is a model? Init and apply over nested dicts of arrays; modules of NNX are seen so here.

Never sees a device, a task or what the model computes.
"""
