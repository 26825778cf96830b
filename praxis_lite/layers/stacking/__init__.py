"""How equal layers stand on each other: repeated, scanned, rematerialized, pipelined.

Never sees what a layer of the stack computes.
"""
