"""Attention kernels, and attention over sequences that are sharded along time.

`choice` selects the kernel: `einsum` (the reference), `chunks`, `blocks`, `fused` or `splash`.
`context_parallel` attends to a sequence that is sharded over the devices of `ring_groups`. Kernels
take queries, keys and values, but no weights.
"""
