"""Where did the time and the memory of the steps in a profile go, and where were they predicted?

Reads the files of a profile, and never runs a step.
"""
