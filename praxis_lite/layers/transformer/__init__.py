"""Transformer blocks, and models that are stacks of them.

Nothing here knows how a stack runs (`stacking`), nor how a whole model splits (`whole_model`).
"""
