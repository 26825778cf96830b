"""How much of the chips' peak do the steps of a job use? MFU and HFU beside each step's metrics.

Knows traced and compiled programs and the table of chips, and never sees a value of an array.
"""
