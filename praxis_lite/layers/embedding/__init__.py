"""Which vectors stand for ids and positions, and which class do features name, at what loss?

Never sees attention, a block of a transformer or a whole model.
"""
