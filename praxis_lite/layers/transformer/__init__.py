"""Transformer layers and the models made of them.

Never sees how a whole model is split: that is a preset's.
"""
