"""Which blocks has a transformer, and which models are stacks of them?

Never sees how a stack runs (`stacking`), nor how a whole model splits (`whole_model`).
"""
