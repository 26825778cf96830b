"""Mixtures of experts.

`mixture_of_experts` has the layer, `gating` Pax's gating functions, `routing` the choice of
experts, `dispatch` the move of tokens to slots of experts, `dropless` experts without a capacity.
"""
