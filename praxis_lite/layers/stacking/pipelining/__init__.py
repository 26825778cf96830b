"""When each stage of a pipeline works on which microbatch, and how: forward and backward.

`Pipeline` is in `stacking/pipelines.py`. Nothing here sees a model or an optimizer but
`one_forward_one_backward.py`, which makes a whole step's gradients.
"""
