"""Layers that turn images into features.

Convolutions and poolings form residual networks (`resnets`); patches are the tokens of transformers
(`vits`). Text and caches are not handled here.
"""
