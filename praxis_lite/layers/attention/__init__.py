"""How positions of a sequence see each other: projections, masks, kernels, caches.

Never sees a whole transformer layer.
"""
