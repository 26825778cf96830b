"""How is the state kept in the memory of hosts, and made again from there on another mesh?

Never sees a disk but to compare steps, nor decides when a job saves.
"""
