"""Layers with a state that runs along the sequence.

Never sees a whole model.
"""
