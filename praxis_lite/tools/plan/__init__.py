"""Will a step fit on a pod, and how long does it take? Answered without the pod.

Reads layouts and compiled programs, and never runs one but with --measure.
"""
