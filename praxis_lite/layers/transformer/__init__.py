"""What is a transformer's block, and which models are stacks of it?

Never sees how a stack runs (`stacking`), nor how a whole model splits (`whole_model`).
"""
