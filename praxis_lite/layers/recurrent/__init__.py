"""Which layers stand in attention's place with a state of fixed size, whatever the length?

Never sees a block of a transformer or a whole model.
"""
