"""What can stand in attention's place with a state of one size, whatever the length?

Never sees a block of a transformer or a whole model.
"""
