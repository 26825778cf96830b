"""Transformer blocks, and models that are stacks of them.

How a stack runs is in `stacking`, and how a whole model is split is in `whole_model`.
"""
