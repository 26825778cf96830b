"""Images: convolutions, poolings, residual networks, vision transformers.

Never sees text or a cache.
"""
