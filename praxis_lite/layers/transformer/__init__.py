"""Transformer blocks, and models built from stacks of blocks.

`stacking` runs the stacks, and `whole_model` defines how complete models are sharded.
"""
