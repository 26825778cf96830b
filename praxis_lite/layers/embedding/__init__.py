"""Which vector stands for an id or a position, and which class do features mean, at which loss?

Never sees attention, a block of a transformer or a whole model.
"""
