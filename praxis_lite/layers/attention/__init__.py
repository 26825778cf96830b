"""How do the positions of a sequence see each other?

`heads` has the weights, `attentions` the layer, `masks` what is seen, `kernels` the ways to compute
it, on one device and over several, `cache` what decoding keeps. Never sees a block of a
transformer, nor what the features are for.
"""
