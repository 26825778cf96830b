"""Work of other processes: batches ahead of training, or to compare; all examples, on all cores.

What is in a batch is the pipelines' affair.
"""
