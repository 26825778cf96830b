"""Attention kernels, and attention to a sequence that is split over devices.

`choice` chooses the kernel: `einsum` (the reference), `chunks`, `blocks`, `fused` or `splash`.
`context_parallel` splits a sequence over the devices of `ring_groups`. All take queries, keys and
values; none sees a weight.
"""
