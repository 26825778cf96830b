"""The training loop: when steps run, and when they are evaluated, saved and reported.

Deals with steps, data, checkpoints and clocks; never with mesh axes or the maths of layers.
"""
