"""Mixtures of experts.

`mixture_of_experts` contains the layer, `gating` contains Pax's gating functions, and `routing`
chooses experts. `dispatch` moves tokens to experts with a capacity; `dropless` moves them to
experts without a capacity.
"""
