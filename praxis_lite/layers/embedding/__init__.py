"""Ids and positions into features, features into logits and a loss.

Never sees attention or a whole model.
"""
