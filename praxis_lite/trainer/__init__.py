"""When does a step run, and when is it evaluated, saved and reported?

Knows steps, data, checkpoints and clocks, and never sees a mesh axis or what a layer computes.
"""
