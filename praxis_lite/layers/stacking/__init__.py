"""Stacks of identical layers.

`repeats` scans layers or calls them one by one, `pipelines` distributes them over stages,
`remat_policies` selects which activations the backward pass saves, and `tensor_parallel` splits a
layer with explicit collectives. Nothing here depends on what a layer computes.
"""
