"""Attention kernels, and attention over sequences that are split over devices.

`choice` selects the kernel: `einsum` (the reference), `chunks`, `blocks`, `fused` or `splash`.
`context_parallel` splits a sequence over the devices of `ring_groups`. Kernels take queries, keys
and values, and no weights.
"""
