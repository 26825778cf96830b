"""How do the positions of a sequence see each other?

`heads` has the weights, `attentions` the layer, `masks` what is seen, `kernels` the choice among
`einsum` (the reference), `chunks` and `fused`, `cache` what decoding keeps. Never sees a block of a
transformer, nor what the features are for.
"""
