"""Mixtures of experts.

`mixture_of_experts` contains the layer, `gating` Pax's gating functions, `routing` the choice of
experts, `dispatch` moves tokens to experts with a capacity, `dropless` to experts without one.
"""
