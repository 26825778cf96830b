"""Stacks of equal layers.

`repeats` scans layers or calls them in a row, `pipelines` distributes them over stages,
`checkpoint_policy` chooses what the backward pass saves, `tensor_parallel` splits a layer with
explicit collectives. Nothing here knows what a layer computes.
"""
