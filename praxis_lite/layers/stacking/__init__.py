"""How do equal layers stand on each other?

`repeats` scans them or calls them in a row, `pipelines` lays them on stages, `checkpoint_policy`
says what the backward pass keeps. Never sees what a layer of the stack computes.
"""
