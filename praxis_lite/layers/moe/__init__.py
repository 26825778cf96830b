"""Which tokens go through which experts, and how do they get there and back?

`mixture_of_experts` has the layer, `gating` its ways, `routing` the choice of experts, `dispatch`
the move to their slots, `dropless` one without slots. Never sees attention or a whole model.
"""
