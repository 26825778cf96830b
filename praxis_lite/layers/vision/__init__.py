"""Layers that compute features of images: residual networks (`resnets`) and vision transformers.

Vision transformers (`vits`) use patches as tokens.
"""
