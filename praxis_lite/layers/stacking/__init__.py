"""Stacks of identical layers.

`repeats` scans layers or calls them one by one, `pipelines` distributes them over stages,
`remat_policies` selects the activations that are saved for the backward pass, and
`tensor_parallel` shards a layer with explicit collectives. Nothing here depends on what a layer
computes.
"""
