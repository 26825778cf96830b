"""Attention kernels, and attention over sequences that are sharded along time.

`choice` selects the kernel: `einsum` (the reference), `chunks`, `blocks`, `fused` or `splash`.
`context_parallel` computes attention over sequences that are sharded over a ring of devices
(`ring_groups`). A layer's `settings` select both. Kernels take queries, keys and values, but no
weights.
"""
