"""Batches made by other processes: ahead of training, or to compare what each makes.

What is in a batch is the pipelines' affair.
"""
