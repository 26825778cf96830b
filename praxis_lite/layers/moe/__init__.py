"""Mixtures of experts: routing, dispatch, experts, balance.

Never sees attention or a whole model.
"""
