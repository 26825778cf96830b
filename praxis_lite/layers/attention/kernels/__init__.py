"""By which kernel is attention computed, and how do devices share a sequence?

`choice` says which kernel runs and why: `einsum` (the reference), `chunks`, `blocks` or one of
`fused`. `context_parallel` is for a sequence whose time several devices have, which are `stations`
of a ring. Takes queries, keys and values; never sees a weight.
"""
